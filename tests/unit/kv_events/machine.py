"""A prefix cache with events, the index of a subscriber, and the content of the cache."""

import random

import msgspec
import numpy as np
import zmq
from k8s_harness.incluster.kv_index import BlockIndex

from minisgl.core.rows import Steps
from minisgl.kv_events import CacheEvents
from minisgl.kv_events.messages import EventBatch, KVEvent
from minisgl.kv_events.publisher import Publisher
from minisgl.kvcache.fenced_pool import FencedPool
from minisgl.kvcache.radix import RadixCache
from minisgl.message.stats import KVEventTotals

BLOCK = 4


def addresses(publisher: Publisher) -> tuple[str, str]:
    """The bound addresses of the stream and of the replay."""
    assert publisher._replay is not None
    return (
        publisher._pub.get_string(zmq.LAST_ENDPOINT),
        publisher._replay.get_string(zmq.LAST_ENDPOINT),
    )


def raise_it(error: Exception) -> None:
    """Let the test fail: the thread of the publisher must not end."""
    raise error


def started(
    publisher: Publisher, block_size: int, model: str, page_size: int, num_pages: int
) -> CacheEvents:
    """Start the publisher, and return a listener that it publishes."""
    publisher.start(raise_it)
    return CacheEvents(block_size, model, publisher.put, publisher.totals, page_size, num_pages)


class Replica:
    """A cache of `num_pages` pages, whose events one subscriber receives as bytes.

    full: the queue of the publisher is full, so that batches are dropped.
    """

    def __init__(self, page_size: int, num_pages: int) -> None:
        self.pool = FencedPool(num_pages, Steps())
        self.page_size = page_size
        self.full = False
        self.index = BlockIndex()
        self.events = CacheEvents(BLOCK, "model", self._put, KVEventTotals(), page_size, num_pages)
        self.cache = RadixCache(page_size, Steps(), [self.events])

    def insert(self, tokens: list[int], salt: str) -> None:
        """Insert the whole pages of a prompt, and evict if needed, as Memory does."""
        key = np.array(tokens[: len(tokens) // self.page_size * self.page_size], dtype=np.int32)
        count = len(key) // self.page_size
        if count > self.pool.size:
            return
        self.evict(count - self.pool.num_free)
        pages = self.pool.allocate(count)
        kept = self.cache.insert(key, pages, salt).prefix_pages()
        self.pool.release(pages[pages != kept], 0)

    def evict(self, count: int) -> None:
        for evicted in self.cache.evict(count):
            self.pool.release(evicted.pages, 0)

    def content(self) -> list[tuple[str, bytes]]:
        """Salt and tokens of each prefix that ends with a cached block, from a walk of the tree."""
        found = []
        page_bytes = self.page_size * 4
        nodes = [
            (child.key[:-page_bytes].decode(), b"", child)
            for child in self.cache._root.children.values()
        ]
        while nodes:
            salt, before, node = nodes.pop()
            path = before + node.tokens.tobytes()
            for end in range(BLOCK * 4, len(path) + 1, BLOCK * 4):
                if end > len(before):
                    found.append((salt, path[:end]))
            nodes += [(salt, path, child) for child in node.children.values()]
        return found

    def check(self, complete: bool = True) -> None:
        """The index has the blocks that the listener counts. complete: and all cached blocks."""
        totals, index = self.events.totals, self.index
        content = self.content()
        found = 0
        for salt, path in content:
            tokens = np.frombuffer(path, dtype=np.int32)
            found += index.match(tokens, BLOCK, salt) == len(tokens)
        assert index.orphans == 0
        assert (index.blocks, index.checksum) == (totals.blocks, totals.checksum)
        assert index.blocks == found, "the index has a block that the cache lacks"
        assert not complete or found == len(content), "the index lacks a cached block"

    def _put(self, events: list[KVEvent]) -> bool:
        if self.full:
            return False
        payload = msgspec.msgpack.encode(EventBatch(0.0, events))
        for event in msgspec.msgpack.decode(payload, type=EventBatch).events:
            self.index.apply(event)
        return True


def random_operation(replica: Replica, draw: random.Random, prompts: list[list[int]]) -> None:
    """Insert a prompt that often continues an earlier one, or evict a few pages."""
    if draw.random() < 0.2:
        replica.evict(draw.randrange(1, 6))
    else:
        prefix = []
        if prompts and draw.random() < 0.7:
            base = draw.choice(prompts)
            prefix = base[: draw.randrange(len(base) + 1)]
        prompt = prefix + [draw.randrange(3) for _ in range(draw.randrange(1, 30))]
        prompts.append(prompt)
        del prompts[:-50]
        replica.insert(prompt, draw.choice(["", "", "salt"]))
    replica.events.flush()
