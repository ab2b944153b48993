"""Where a scheduler's messages come from."""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from minisgl.core import InvariantBroken
from minisgl.message import Receiver, Sender, wire


class Inbox(Protocol):
    """The ordered input of one rank."""

    def receive(self, block: bool, plan_hash: int | None = None) -> Sequence[wire.ToScheduler]:
        """The messages of this iteration. block: wait until there is one.

        plan_hash: of the batch that this rank launched last, to be compared between ranks.
        """


class QueueInbox:
    """Rank 0 of a server: what the API server sends."""

    def __init__(self, receiver: Receiver[wire.ToScheduler]) -> None:
        self._receiver = receiver

    def receive(self, block: bool, plan_hash: int | None = None) -> Sequence[wire.ToScheduler]:
        if block:
            self._receiver.poll(None)
        return list(self._receiver.drain())


class LocalInbox:
    """A deque in the same process: the offline LLM and tests."""

    def __init__(self) -> None:
        self.messages: deque[wire.ToScheduler] = deque()

    def receive(self, block: bool, plan_hash: int | None = None) -> Sequence[wire.ToScheduler]:
        """Never blocks: in one process nobody else could send."""
        messages = list(self.messages)
        self.messages.clear()
        return messages


class LeaderInbox:
    """Rank 0 with followers: passes each iteration's messages on before using them itself."""

    def __init__(self, source: Inbox, followers: Sequence[Sender[wire.LeaderStep]]) -> None:
        self._source = source
        self._followers = followers
        self._iteration = 0

    def receive(self, block: bool, plan_hash: int | None = None) -> Sequence[wire.ToScheduler]:
        messages = self._source.receive(block)
        self._iteration += 1
        step = wire.LeaderStep(
            iteration=self._iteration, messages=list(messages), plan_hash=plan_hash
        )
        for follower in self._followers:
            follower.send(step)
        return messages


class FollowerInbox:
    """Ranks 1..n-1: exactly one LeaderStep per iteration, in order."""

    def __init__(self, receiver: Receiver[wire.LeaderStep]) -> None:
        self._receiver = receiver
        self._steps: deque[wire.LeaderStep] = deque()
        self._iteration = 0

    def receive(self, block: bool, plan_hash: int | None = None) -> Sequence[wire.ToScheduler]:
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
