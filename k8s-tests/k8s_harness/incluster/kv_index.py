"""Rebuilds the prefix cache of one replica from its KV events, with the messages of the image.

argv[1]: JSON {"replay": address}. stdout: one JSON line {"topic", "blocks", "checksum", "orphans",
"batches"} about the whole stream so far.
"""

import hashlib
import json
import sys

import msgspec
import numpy as np
import zmq

from minisgl.core.batch import Int32Array
from minisgl.kv_events.messages import BlockRemoved, BlockStored, EventBatch, KVEvent

TIMEOUT_MS = 60_000


class BlockIndex:
    """The blocks in the prefix cache of one replica, found by their tokens.

    Like llm-d's endpoint picker, the index computes keys of its own from the tokens. It uses the
    hashes of the events only to find parents and removed blocks.

    orphans  blocks that were dropped because their parent is unknown: the subscriber has missed
             events.
    """

    def __init__(self) -> None:
        self.orphans = 0
        self._keys: dict[int, bytes] = {}  # by the hash of the event
        self._known: set[bytes] = set()

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return len(self._keys)

    @property
    def checksum(self) -> int:
        """Exclusive or of the hashes of the blocks, as in KVEventTotals."""
        return int(np.bitwise_xor.reduce(np.array([*self._keys], dtype=np.uint64)))

    def apply(self, event: KVEvent) -> None:
        """Apply the next event of the stream."""
        match event:
            case BlockStored():
                self._store(event)
            case BlockRemoved():
                for block in event.block_hashes:
                    self._known.discard(self._keys.pop(block, b""))
            case _:
                self._keys.clear()
                self._known.clear()

    def match(self, tokens: Int32Array, block_size: int, salt: str = "") -> int:
        """Return the number of leading tokens of `tokens`, int32, that are in indexed blocks."""
        key = b""
        for end in range(block_size, len(tokens) + 1, block_size):
            key = _key(key, tokens[end - block_size : end], "" if key else salt)
            if key not in self._known:
                return end - block_size
        return len(tokens) // block_size * block_size

    def _store(self, event: BlockStored) -> None:
        if event.parent_block_hash is not None and event.parent_block_hash not in self._keys:
            self.orphans += len(event.block_hashes)
            return
        key = b"" if event.parent_block_hash is None else self._keys[event.parent_block_hash]
        blocks = np.array(event.token_ids, dtype=np.int32).reshape(-1, event.block_size)
        extra = event.extra_keys or [None] * len(blocks)
        for block, tokens, keys in zip(event.block_hashes, blocks, extra, strict=True):
            key = _key(key, tokens, keys[0] if keys else "")
            self._keys[block] = key
            self._known.add(key)


def _key(parent: bytes, tokens: Int32Array, salt: str) -> bytes:
    return hashlib.sha256(parent + salt.encode() + b"\0" + tokens.tobytes()).digest()


def main() -> None:
    index, topic, batches = BlockIndex(), "", 0
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(json.loads(sys.argv[1])["replay"])
    socket.send_multipart([b"", (0).to_bytes(8, "big")])
    while True:
        _, name, _, payload = socket.recv_multipart()
        if not payload:
            break
        topic, batches = name.decode(), batches + 1
        for event in msgspec.msgpack.decode(payload, type=EventBatch).events:
            index.apply(event)
    facts = {"blocks": index.blocks, "checksum": index.checksum, "orphans": index.orphans}
    print(json.dumps({"topic": topic, "batches": batches, **facts}), flush=True)


if __name__ == "__main__":
    main()
