"""`Replica`: one server of a fleet in virtual time, with the real scheduler and prefix cache."""

import math
from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from minisgl.benchmark.trace import page_chain
from minisgl.benchmark.virtual_engine import EngineSettings
from minisgl.core.batch import Int32Array
from minisgl.message.messages import StepOutput, ToScheduler
from minisgl.scheduler import Scheduler
from minisgl.scheduler.inbox import WaitS


class CacheEvent(NamedTuple):
    """Blocks that a prefix cache has stored or removed.

    A block is one page. Its number is a hash of the page and of all pages before it (page_chain).
    """

    stored: list[int]
    removed: list[int]


class BlockRecorder:
    """Records the blocks that a prefix cache stores and removes, in order."""

    def __init__(self, page_size: int, num_pages: int) -> None:
        self._page_size = page_size
        self._block_of = np.zeros(num_pages, dtype=np.int64)  # 0: the page is not cached
        self.events: list[CacheEvent] = []

    def stored(self, tokens: Int32Array, pages: Int32Array, salt: str) -> None:
        """The prefix `tokens` is cached in `pages`. Its first pages may be known already.

        Without a salt the first block follows 0, as in the chains of the routers: hash("") is 0.
        """
        known = int(np.count_nonzero(self._block_of[pages]))
        if known < len(pages):
            before = int(self._block_of[pages[known - 1]]) if known else hash(salt)
            blocks = page_chain(tokens[known * self._page_size :], self._page_size, before)
            self._block_of[pages[known:]] = blocks
            self.events.append(CacheEvent(blocks, []))

    def removed(self, pages: Int32Array) -> None:
        """These pages have been evicted."""
        self.events.append(CacheEvent([], self._block_of[pages].tolist()))
        self._block_of[pages] = 0


class ReplicaState(StrEnum):
    STARTING = "starting"  # not ready yet
    READY = "ready"  # gets requests
    DRAINING = "draining"  # finishes its requests and gets no new ones
    GONE = "gone"  # has died or ended


class Replica:
    """One server: a scheduler, its engine and its inbox. Implements Inbox.

    The owner calls `iterate` at the time `next_s`. The iteration ends at a later time, the end of a
    step, and `next_s` returns this time. The owner calls `finish` at this time. The outputs and the
    cache events are not visible earlier. A replica that dies earlier loses them.

    iterating  an iteration has begun and `finish` has not been called since.
    open_reqs  uids of the requests that the router has sent here and that have not ended.
    running    requests that the scheduler has admitted, as of the last iteration that has ended.
    kv_usage   share of the pages that requests hold, as of the same time.
    wake_s     the time of the next call in the owner's queue; inf: none.
    """

    def __init__(self, number: int, settings: EngineSettings, observed: bool) -> None:
        """observed: record the events of the prefix cache."""
        self.number = number
        self.state = ReplicaState.STARTING
        self.open_reqs: dict[int, None] = {}
        self.wake_s = math.inf
        self.iterating = False
        self.running = 0
        self.kv_usage = 0.0
        self.engine = settings.engine()
        self._outputs: list[StepOutput] = []
        self._messages: deque[tuple[float, ToScheduler]] = deque()
        self._scheduler = Scheduler(
            self.engine,
            settings.config,
            vocab_size=2**31 - 1,
            eos_token_ids=(),
            inbox=self,
            send=self._outputs.append,
            clock=lambda: self.engine.now_s,
            cost=settings.cost,
        )
        page_size, num_pages = self.engine.page_size, self.engine.num_pages
        self._recorder = BlockRecorder(page_size, num_pages)
        if observed:
            self._scheduler.memory.tree.listeners = (self._recorder,)

    def deliver(self, due_s: float, message: ToScheduler) -> None:
        """Let `message` arrive at due_s. Calls are in the order of due_s."""
        self._messages.append((due_s, message))

    def next_s(self) -> float:
        """Return the end of this iteration, or the start of the next; inf: a message starts it."""
        now_s = self.engine.now_s
        if self.iterating:
            return now_s
        wait_s = self._scheduler.message_wait_s()
        wake_s = math.inf if wait_s is None else now_s + wait_s
        if self._messages:
            wake_s = min(wake_s, max(now_s, self._messages[0][0]))
        return wake_s

    def iterate(self, now_s: float) -> None:
        """Run one iteration of the scheduler from now_s to engine.now_s."""
        self.engine.now_s = now_s
        self.iterating = True
        self._scheduler.iterate()

    def finish(self) -> tuple[list[StepOutput], list[CacheEvent]]:
        """End the iteration: return its outputs and cache events, and update the metrics."""
        self.iterating = False
        outputs, events = self._outputs.copy(), self._recorder.events.copy()
        self._outputs.clear()
        self._recorder.events.clear()
        stats = self._scheduler.stats()
        self.running, self.kv_usage = stats.running_reqs, stats.locked_pages / stats.total_pages
        return outputs, events

    @property
    def waiting(self) -> int:
        """The server's metric: open requests that do not run, received by the scheduler or not."""
        return max(len(self.open_reqs) - self.running, 0)

    def receive(
        self, wait_s: WaitS, plan_hash: int | None = None, own: Sequence[ToScheduler] = ()
    ) -> list[ToScheduler]:
        """Return the messages that have arrived. The owner has already waited."""
        arrived: list[ToScheduler] = []
        while self._messages and self._messages[0][0] <= self.engine.now_s:
            arrived.append(self._messages.popleft()[1])
        return [*arrived, *own]
