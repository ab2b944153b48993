"""The sources of a scheduler's messages."""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from minisgl.core import InvariantBroken
from minisgl.message.messages import LeaderStep, Prepared, ToScheduler
from minisgl.message.queues import Receiver, Sender

Messages = Sequence[ToScheduler]


class Inbox(Protocol):
    """The ordered input of one rank."""

    def receive(
        self, wait_s: float | None, plan_hash: int | None = None, prepared: Sequence[int] = ()
    ) -> Messages:
        """Return the messages of this iteration.

        wait_s: wait at most this long for the first message; None waits without a limit.
        plan_hash: hash of the batch that this rank launched last. Ranks compare their hashes.
        prepared: uids of the requests whose constraints became prepared on this rank. Rank 0 gets
        them back as a Prepared message, after the other messages. The other ranks get the message
        of rank 0.
        """


class QueueInbox:
    """The input of rank 0 of a server: the queue from the API server."""

    def __init__(self, receiver: Receiver[ToScheduler]) -> None:
        self._receiver = receiver

    def receive(
        self, wait_s: float | None, plan_hash: int | None = None, prepared: Sequence[int] = ()
    ) -> Messages:
        """Return as soon as one message has arrived, before wait_s is over.

        The host takes 5 to 8 ms to launch a step with a new prompt. If the
        launch began only at the end of the wait, the GPU would be idle during the launch.
        """
        if wait_s != 0.0:
            self._receiver.poll(wait_s)
        return [*self._receiver.drain(), *_announce(prepared)]


class LocalInbox:
    """A deque that the caller fills, for a scheduler in the caller's process (LLM, tests)."""

    def __init__(self) -> None:
        self.messages: deque[ToScheduler] = deque()

    def receive(
        self, wait_s: float | None, plan_hash: int | None = None, prepared: Sequence[int] = ()
    ) -> Messages:
        """Return at once. The caller adds messages in this thread, so none can arrive in a wait."""
        messages = [*self.messages, *_announce(prepared)]
        self.messages.clear()
        return messages


class LeaderInbox:
    """The input of rank 0. It also sends each iteration's messages to the other ranks."""

    def __init__(self, source: Inbox, followers: Sequence[Sender[LeaderStep]]) -> None:
        self._source = source
        self._followers = followers
        self._iteration = 0

    def receive(
        self, wait_s: float | None, plan_hash: int | None = None, prepared: Sequence[int] = ()
    ) -> Messages:
        messages = self._source.receive(wait_s, prepared=prepared)
        self._iteration += 1
        step = LeaderStep(iteration=self._iteration, messages=list(messages), plan_hash=plan_hash)
        for follower in self._followers:
            follower.send(step)
        return messages


class FollowerInbox:
    """The input of ranks 1..n-1: one LeaderStep for each iteration, in order."""

    def __init__(self, receiver: Receiver[LeaderStep]) -> None:
        self._receiver = receiver
        self._steps: deque[LeaderStep] = deque()
        self._iteration = 0

    def receive(
        self, wait_s: float | None, plan_hash: int | None = None, prepared: Sequence[int] = ()
    ) -> Messages:
        """Wait for the leader's next LeaderStep without a limit. Uses plan_hash only.

        Raises InvariantBroken when the ranks are at different iterations or planned different
        steps.
        """
        while not self._steps:
            self._receiver.poll(None)
            self._steps.extend(self._receiver.drain())
        step = self._steps.popleft()
        self._iteration += 1
        if (step.iteration, step.plan_hash) != (self._iteration, plan_hash):
            raise InvariantBroken(
                "the ranks planned different steps: the leader is at iteration "
                f"{step.iteration} with plan hash {step.plan_hash}, this rank at iteration "
                f"{self._iteration} with plan hash {plan_hash}; this is a bug"
            )
        return step.messages


def _announce(uids: Sequence[int]) -> list[Prepared]:
    return [Prepared(uids=list(uids))] if uids else []
