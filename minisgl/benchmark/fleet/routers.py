"""Routers: the choice of the replica of a request.

The endpoint picker is the one of the Gateway API Inference Extension (llm-d-router, ebab687,
2026-08-21): the sum of weighted scores, the highest wins, a tie is broken at random. The weights
are those of helm/endpoint-picker/config.yaml.
"""

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from minisgl.benchmark.fleet.replica import CacheEvent, Replica
from minisgl.benchmark.trace import page_chain
from minisgl.core.batch import Int32Array

QUEUE_WEIGHT, KV_WEIGHT, PREFIX_WEIGHT = 2.0, 2.0, 3.0
SCRAPE_S = 0.05  # the endpoint picker reads the metrics of each replica this often
APPROXIMATE_BLOCK_TOKENS = 64  # the smallest block of its approximate index
APPROXIMATE_MAX_TOKENS = 131_072  # it hashes at most this part of a prompt


class RequestRouter(Protocol):
    """Chooses a replica for each request.

    reads_cache  the router needs the cache events of the replicas.
    """

    reads_cache: bool

    def choose(self, prompt: Int32Array, ready: Sequence[Replica], now_s: float) -> Replica:
        """Return one of the ready replicas. There is at least one."""

    def cache_events(self, replica: int, events: Sequence[CacheEvent]) -> None:
        """Take the cache events of a replica, in order."""

    def forget(self, replica: int) -> None:
        """Drop the state of a replica that has died or ended."""


class _BlindRouter:
    """A router that does not look at prompts and caches."""

    reads_cache = False

    def cache_events(self, replica: int, events: Sequence[CacheEvent]) -> None:
        """The choice does not depend on the caches."""

    def forget(self, replica: int) -> None:
        """The router has no state of a replica."""


class RoundRobin(_BlindRouter):
    """Chooses the replicas in turn."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, prompt: Int32Array, ready: Sequence[Replica], now_s: float) -> Replica:
        later = [replica for replica in ready if replica.number > self._last]
        chosen = min(later or ready, key=lambda replica: replica.number)
        self._last = chosen.number
        return chosen


class LeastLoad(_BlindRouter):
    """Chooses a replica with the fewest open requests, at random among equals."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, prompt: Int32Array, ready: Sequence[Replica], now_s: float) -> Replica:
        return min(ready, key=lambda replica: (len(replica.open_reqs), self._random.random()))


class PrefixIndex:
    """The blocks of each replica, as far as a router knows them.

    A router fills the index from its own choices, or from the cache events of the replicas. With a
    capacity, the index keeps the blocks of a replica that were stored last (LRU).
    """

    def __init__(self, capacity: int | None = None) -> None:
        """capacity: largest number of blocks of one replica; None: no limit."""
        self._capacity = math.inf if capacity is None else capacity
        self._holders: dict[int, set[int]] = {}
        self._blocks: dict[int, dict[int, None]] = {}  # by replica, the oldest block first

    def stored(self, replica: int, blocks: Sequence[int]) -> None:
        kept = self._blocks.setdefault(replica, {})
        for block in blocks:
            kept.pop(block, None)
            kept[block] = None
            self._holders.setdefault(block, set()).add(replica)
            if len(kept) > self._capacity:
                self.removed(replica, [next(iter(kept))])

    def removed(self, replica: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self._blocks[replica][block]
            holders = self._holders[block]
            holders.remove(replica)
            if not holders:
                del self._holders[block]

    def forget(self, replica: int) -> None:
        self.removed(replica, [*self._blocks.get(replica, ())])

    def matches(self, chain: Sequence[int]) -> Counter[int]:
        """Count the blocks that each replica holds, up to the first block without a holder."""
        found: Counter[int] = Counter()
        for block in chain:
            holders = self._holders.get(block)
            if holders is None:
                break
            found.update(holders)
        return found


class EndpointPicker:
    """The endpoint picker with its scorers for queues, KV usage and cached prefixes.

    This class is the router `precise`: the cache events of the replicas fill its index. Its metrics
    are up to SCRAPE_S old.
    """

    reads_cache = True

    def __init__(self, seed: int, block_tokens: int, capacity: int | None = None) -> None:
        self._random = random.Random(seed)
        self._block_tokens = block_tokens
        self._index = PrefixIndex(capacity)
        self._scraped_s = -math.inf
        self._metrics: dict[int, tuple[int, float]] = {}  # waiting requests and KV usage by replica

    def choose(self, prompt: Int32Array, ready: Sequence[Replica], now_s: float) -> Replica:
        if now_s >= self._scraped_s + SCRAPE_S:
            self._scraped_s = now_s
            self._metrics = {r.number: (r.waiting, r.kv_usage) for r in ready}
        chain = self._chain(prompt)
        held = self._index.matches(chain)
        views = [self._metrics.get(replica.number, (0, 0.0)) for replica in ready]
        shortest, longest = min(views)[0], max(views)[0]
        best: tuple[float, float, Replica] = (-math.inf, 0.0, ready[0])
        for replica, (waiting, kv_usage) in zip(ready, views, strict=True):
            queue = (longest - waiting) / (longest - shortest) if longest > shortest else 1.0
            prefix = held[replica.number] / len(chain) if chain else 0.0
            score = QUEUE_WEIGHT * queue + KV_WEIGHT * (1 - kv_usage) + PREFIX_WEIGHT * prefix
            best = max(best, (score, self._random.random(), replica), key=lambda entry: entry[:2])
        self._chosen(best[2].number, chain)
        return best[2]

    def cache_events(self, replica: int, events: Sequence[CacheEvent]) -> None:
        for stored, removed in events:
            self._index.removed(replica, removed)
            self._index.stored(replica, stored)

    def forget(self, replica: int) -> None:
        self._index.forget(replica)

    def _chain(self, prompt: Int32Array) -> list[int]:
        return page_chain(prompt, self._block_tokens)

    def _chosen(self, replica: int, chain: Sequence[int]) -> None:
        """Do nothing: the cache events report the blocks that the replica stores."""


class ApproximatePicker(EndpointPicker):
    """The endpoint picker without cache events.

    It assumes that a replica caches each prompt that the router sends to the replica.
    """

    reads_cache = False

    def __init__(self, seed: int, num_pages: int) -> None:
        """num_pages: pages of a replica.

        The picker takes this number as the capacity of its index in blocks, even though a block is
        larger than a page.
        """
        super().__init__(seed, APPROXIMATE_BLOCK_TOKENS, num_pages)

    def _chain(self, prompt: Int32Array) -> list[int]:
        blocks = super()._chain(prompt[:APPROXIMATE_MAX_TOKENS])
        rest = prompt[len(blocks) * APPROXIMATE_BLOCK_TOKENS : APPROXIMATE_MAX_TOKENS]
        if len(rest):  # a last block that is not full counts too
            blocks += page_chain(rest, len(rest), blocks[-1] if blocks else 0)
        return blocks

    def _chosen(self, replica: int, chain: Sequence[int]) -> None:
        self._index.stored(replica, chain)


ROUTERS = ("round-robin", "least-load", "approximate", "precise")


def make_router(name: str, page_size: int, num_pages: int, seed: int) -> RequestRouter:
    """Return a new router. name: one of ROUTERS. page_size, num_pages: of each replica."""
    if name == "round-robin":
        return RoundRobin()
    if name == "least-load":
        return LeastLoad(seed)
    if name == "approximate":
        return ApproximatePicker(seed, num_pages)
    return EndpointPicker(seed, page_size)
