"""Where a scheduler's messages come from."""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from minisgl.core import InvariantBroken
from minisgl.message import LeaderStep, Receiver, Sender, ToScheduler

Messages = Sequence[ToScheduler]


class Inbox(Protocol):
    """The ordered input of one rank."""

    def receive(self, wait_s: float | None, plan_hash: int | None = None) -> Messages:
        """The messages of this iteration. wait_s: for the first of them; None: without end.

        plan_hash: of the batch that this rank launched last, to be compared between ranks.
        """


class QueueInbox:
    """Rank 0 of a server: what the API server sends."""

    def __init__(self, receiver: Receiver[ToScheduler]) -> None:
        self._receiver = receiver

    def receive(self, wait_s: float | None, plan_hash: int | None = None) -> Messages:
        """The first message ends a wait: to launch a step with its prompt takes the host 5 to 8 ms,
        and begun at the end of the wait it leaves the GPU dry."""
        if wait_s != 0.0:
            self._receiver.poll(wait_s)
        return list(self._receiver.drain())


class LocalInbox:
    """A deque in the same process: the offline LLM and tests."""

    def __init__(self) -> None:
        self.messages: deque[ToScheduler] = deque()

    def receive(self, wait_s: float | None, plan_hash: int | None = None) -> Messages:
        """Never waits: in one process nobody else could send."""
        messages = list(self.messages)
        self.messages.clear()
        return messages


class LeaderInbox:
    """Rank 0 with followers: passes each iteration's messages on before using them itself."""

    def __init__(self, source: Inbox, followers: Sequence[Sender[LeaderStep]]) -> None:
        self._source = source
        self._followers = followers
        self._iteration = 0

    def receive(self, wait_s: float | None, plan_hash: int | None = None) -> Messages:
        messages = self._source.receive(wait_s)
        self._iteration += 1
        step = LeaderStep(iteration=self._iteration, messages=list(messages), plan_hash=plan_hash)
        for follower in self._followers:
            follower.send(step)
        return messages


class FollowerInbox:
    """Ranks 1..n-1: exactly one LeaderStep per iteration, in order."""

    def __init__(self, receiver: Receiver[LeaderStep]) -> None:
        self._receiver = receiver
        self._steps: deque[LeaderStep] = deque()
        self._iteration = 0

    def receive(self, wait_s: float | None, plan_hash: int | None = None) -> Messages:
        while not self._steps:
            self._receiver.poll(None)
            self._steps.extend(self._receiver.drain())
        step = self._steps.popleft()
        self._iteration += 1
        if step.iteration != self._iteration:
            raise InvariantBroken(
                f"leader is at iteration {step.iteration}, this rank at {self._iteration}; "
                "this is a bug"
            )
        if step.plan_hash != plan_hash:
            raise InvariantBroken(
                f"before iteration {step.iteration} the ranks planned different steps; "
                "this is a bug"
            )
        return step.messages
