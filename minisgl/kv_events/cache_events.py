"""`CacheEvents`: turns insertions and evictions of the prefix cache into events of blocks."""

import hashlib
from collections.abc import Callable

import numpy as np

from minisgl.core import ConfigError
from minisgl.core.batch import Int32Array
from minisgl.kv_events.messages import (
    KV_MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
)
from minisgl.message.stats import KVEventTotals


class CacheEvents:
    """A CacheListener that publishes events of blocks. Each call takes microseconds.

    A block is cached if its last page is cached, because the cache holds whole prefixes. The
    listener therefore needs no copy of the tree: one number per page is enough.

    `put` takes the events of one iteration, and returns False if its queue is full. The events are
    then lost. The listener forgets all blocks and announces AllBlocksCleared. It announces a block
    again when the cache next inserts a prefix with this block. The index of a subscriber therefore
    has no block that the cache lacks.

    _hashes  by page: the hash of the announced block that ends with this page; 0: none.

    I1  If a block is announced, all blocks before it are announced.
    I2  Equal tokens under an equal salt give equal hashes, also after a restart of the same model.
    """

    def __init__(
        self,
        block_size: int,
        model: str,
        put: Callable[[list[KVEvent]], bool],
        totals: KVEventTotals,
        page_size: int,
        num_pages: int,
    ) -> None:
        """block_size: in tokens. totals: the object in which the listener counts.

        Raises ConfigError when pages do not fill whole blocks.
        """
        if block_size % page_size:
            raise ConfigError(
                f"--kv-events-block-size {block_size} is not a multiple of the page size "
                f"{page_size}; choose a multiple"
            )
        self.totals = totals
        self._block_size = block_size
        self._pages_per_block = block_size // page_size
        self._model = model
        self._put = put
        self._hashes = [0] * num_pages
        self._pending: list[KVEvent] = []

    def stored(self, tokens: Int32Array, pages: Int32Array, salt: str) -> None:
        """Announce the blocks of a cached prefix that are not announced yet.

        tokens: int32 [n * page_size], from the first token of the prompt. pages: int32 [n].
        """
        size, hashes = self._block_size, self._hashes
        ends = pages[self._pages_per_block - 1 :: self._pages_per_block].tolist()
        first = len(ends)
        while first and not hashes[ends[first - 1]]:
            first -= 1
        if first == len(ends):
            return
        parent = hashes[ends[first - 1]] if first else 0
        last = parent or _digest(f"{self._model}\n{salt}".encode(), b"")
        added = []
        for block in range(first, len(ends)):
            last = _digest(tokens[block * size : (block + 1) * size].tobytes(), last.to_bytes(8))
            hashes[ends[block]] = last
            added.append(last)
        extra: list[list[str] | None] | None = None
        if salt and not first:
            extra = [[salt], *[None] * (len(added) - 1)]
        self._pending.append(
            BlockStored(
                block_hashes=added,
                parent_block_hash=parent or None,
                token_ids=tokens[first * size : len(ends) * size].tolist(),
                block_size=size,
                lora_id=None,
                medium=KV_MEDIUM,
                lora_name=None,
                extra_keys=extra,
            )
        )
        self.totals.stored += len(added)
        self._count(added, 1)

    def removed(self, pages: Int32Array) -> None:
        """Announce the removal of the blocks that end with one of these pages, int32."""
        gone = []
        for page in pages.tolist():
            if self._hashes[page]:
                gone.append(self._hashes[page])
                self._hashes[page] = 0
        if gone:
            self._pending.append(BlockRemoved(block_hashes=gone, medium=KV_MEDIUM))
            self.totals.removed += len(gone)
            self._count(gone, -1)

    def flush(self) -> None:
        """Publish the events since the last call as one batch."""
        if not self._pending:
            return
        if self._put(self._pending):
            self._pending = []
            return
        self.totals.dropped += 1
        self._hashes = [0] * len(self._hashes)
        self.totals.blocks = self.totals.checksum = 0
        self._pending = [AllBlocksCleared()]

    def _count(self, hashes: list[int], sign: int) -> None:
        self.totals.blocks += sign * len(hashes)
        self.totals.checksum ^= int(np.bitwise_xor.reduce(np.array(hashes, dtype=np.uint64)))


def _digest(data: bytes, key: bytes) -> int:
    """A 64-bit hash above 2^63.

    0 stands for no block, and llm-d's decoder reads only hashes that MessagePack encodes in 64
    bits.
    """
    digest = hashlib.blake2b(data, digest_size=8, key=key).digest()
    return int.from_bytes(digest) | 1 << 63
