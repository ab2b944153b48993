"""The sources of a scheduler's messages."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from minisgl.core import InvariantBroken
from minisgl.message.messages import AddReq, LeaderStep, ToScheduler
from minisgl.message.queues import Receiver, Sender, send_to_all

Messages = Sequence[ToScheduler]
WaitS = Callable[[], float | None]


class Inbox(Protocol):
    """The ordered input of one rank."""

    def receive(self, wait_s: WaitS, plan_hash: int | None = None, own: Messages = ()) -> Messages:
        """Return the messages of this iteration.

        wait_s: returns the longest time to wait for the first message; None: without a limit.
        plan_hash: hash of the batch that this rank launched last. Ranks compare their hashes.
        own: messages of this rank about itself (OfRank0). Rank 0 gets them back after the other
        messages. The other ranks get the messages of rank 0 and drop their own.
        """


class LocalInbox:
    """The input of rank 0: a deque that the caller fills in the same thread (LLM, tests).

    It also sends each iteration's messages to the other ranks, without the pixels of images.
    """

    def __init__(self, followers: Sequence[Sender[LeaderStep]] = ()) -> None:
        self.messages: deque[ToScheduler] = deque()
        self._followers = followers
        self._iteration = 0

    def receive(self, wait_s: WaitS, plan_hash: int | None = None, own: Messages = ()) -> Messages:
        messages = [*self.messages, *own]
        self.messages.clear()
        self._iteration += 1
        if self._followers:
            sent = [_without_pixels(message) for message in messages]
            step = LeaderStep(iteration=self._iteration, messages=sent, plan_hash=plan_hash)
            send_to_all(self._followers, step)
        return messages


def _without_pixels(message: ToScheduler) -> ToScheduler:
    """Return a message for the other ranks: rank 0 alone encodes images."""
    if not isinstance(message, AddReq) or not message.images:
        return message
    images = tuple(image.without_pixels() for image in message.images)
    return msgspec.structs.replace(message, images=images)


class QueueInbox(LocalInbox):
    """The input of rank 0 of a server: the queue from the API server."""

    def __init__(
        self, receiver: Receiver[ToScheduler], followers: Sequence[Sender[LeaderStep]] = ()
    ) -> None:
        super().__init__(followers)
        self._receiver = receiver

    def receive(self, wait_s: WaitS, plan_hash: int | None = None, own: Messages = ()) -> Messages:
        """Return the messages that have arrived.

        The wait ends as soon as one message has arrived. The host takes 5 to 8 ms to launch a step
        with a new prompt. If the launch began only after wait_s, the GPU would be idle during the
        launch.
        """
        if (longest_s := wait_s()) != 0.0:
            self._receiver.poll(longest_s)
        self.messages.extend(self._receiver.drain())
        return super().receive(wait_s, plan_hash, own)


class FollowerInbox:
    """The input of ranks 1..n-1: one LeaderStep for each iteration, in order."""

    def __init__(self, receiver: Receiver[LeaderStep]) -> None:
        self._receiver = receiver
        self._iteration = 0

    def receive(self, wait_s: WaitS, plan_hash: int | None = None, own: Messages = ()) -> Messages:
        """Wait for the leader's next LeaderStep without a limit. Uses plan_hash only.

        Raises InvariantBroken when the ranks are at different iterations or planned different
        steps.
        """
        while (step := next(self._receiver.drain(), None)) is None:
            self._receiver.poll(None)
        self._iteration += 1
        if (step.iteration, step.plan_hash) != (self._iteration, plan_hash):
            raise InvariantBroken(
                "the ranks planned different steps: the leader is at iteration "
                f"{step.iteration} with plan hash {step.plan_hash}, this rank at iteration "
                f"{self._iteration} with plan hash {plan_hash}; this is a bug"
            )
        return step.messages
