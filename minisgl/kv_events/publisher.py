"""`Publisher`: sends the events of the prefix cache to any number of subscribers.

The sockets and their protocol are those of vLLM: a PUB socket, and a ROUTER socket from which a
subscriber asks for earlier messages.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn, cast

import msgspec
import zmq

from minisgl.core import ConfigError
from minisgl.kv_events.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVEvent,
)
from minisgl.message.stats import KVEventTotals

MAX_QUEUED = 4096  # batches that wait for the thread
MAX_REPLAYED = 10_000  # batches that a subscriber can ask for
MAX_REPLAYED_BYTES = 64 * 2**20
_SNAPSHOT_BLOCKS = 256  # blocks in one batch of a snapshot
_SUBSCRIBER_QUEUE = 100_000  # messages for one subscriber; zmq drops further ones
_MAX_REQUEST_BYTES = 4096  # zmq holds a whole message of a peer, and has no limit of its own
_END = (-1).to_bytes(8, signed=True)  # the sequence number that ends a replay


class Publisher:
    """A thread with the sockets of the event stream, beside the scheduler of rank 0.

    The scheduler calls `put`, which neither blocks nor encodes. A slow subscriber loses messages,
    notices the gap in the sequence numbers, and asks for a replay.

    The replay of llm-d's picker begins at sequence number 0, because a picker that joins late needs
    every block. The publisher therefore cannot drop the first messages and keep the others. When
    the messages exceed MAX_REPLAYED, or their bytes a limit, the stream begins anew at number 0
    with a snapshot: AllBlocksCleared and the present blocks. To a subscriber this looks like a
    restart of the replica.

    totals  the state of the stream. The publisher sets `sequence`; CacheEvents counts the rest.
    _log    the payloads of the stream; the index is the sequence number. Empty without a replay
            socket; the stream then never begins anew.
    _blocks by hash: the announced blocks, each as an encoded BlockStored. A block comes after its
            parent.
    """

    def __init__(self, endpoint: str, replay_endpoint: str | None, topic: str) -> None:
        """Bind the sockets. Raises ConfigError when an address cannot be bound."""
        self.totals = KVEventTotals()
        self._topic = topic.encode()
        self._queue: deque[list[KVEvent]] = deque()
        self._encoder = msgspec.msgpack.Encoder()
        self._log: list[bytes] = []
        self._log_bytes = self._snapshot_bytes = 0
        self._blocks: dict[int, msgspec.Raw] = {}
        # close_queues ends the common context while the thread still uses these sockets.
        context = zmq.Context()
        self._pub = _bind(context, zmq.PUB, endpoint, _SUBSCRIBER_QUEUE)
        self._replay: zmq.Socket[bytes] | None = None
        if replay_endpoint is not None:
            self._replay = _bind(context, zmq.ROUTER, replay_endpoint, 2 * MAX_REPLAYED)
        self._bell = os.eventfd(0)  # wakes the thread

    def start(self, on_failure: Callable[[Exception], object]) -> None:
        """Start the thread, which runs until the process ends. Only the thread uses the sockets.

        on_failure: the thread calls it with the exception that ends it. It has to end the process:
        without the thread the stream has no further message, and subscribers do not notice.
        """
        arguments = (on_failure,)
        threading.Thread(target=self._run, args=arguments, name="kv-events", daemon=True).start()

    def put(self, events: list[KVEvent]) -> bool:
        """Queue the events of one message; return False, and drop them, when the queue is full."""
        if len(self._queue) >= MAX_QUEUED:
            return False
        self._queue.append(events)
        os.eventfd_write(self._bell, 1)
        return True

    def _run(self, on_failure: Callable[[Exception], object]) -> None:
        try:
            self._serve()
        except Exception as error:
            on_failure(error)
            raise

    def _serve(self) -> NoReturn:
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._bell in ready:
                os.eventfd_read(self._bell)
                while self._queue:
                    self._publish(self._queue.popleft())
            if self._replay is not None and self._replay in ready:
                self._send_replay(self._replay)

    def _publish(self, events: list[KVEvent]) -> None:
        if self._replay is None:
            self._send(events)
            return
        self._apply(events)
        most_bytes = max(MAX_REPLAYED_BYTES, 4 * self._snapshot_bytes)
        if len(self._log) < MAX_REPLAYED and self._log_bytes < most_bytes:
            self._send(events)
            return
        self._log, self._log_bytes, self.totals.sequence = [], 0, 0
        snapshot: list[KVEvent | msgspec.Raw] = [AllBlocksCleared(), *self._blocks.values()]
        for start in range(0, len(snapshot), _SNAPSHOT_BLOCKS):
            self._send(snapshot[start : start + _SNAPSHOT_BLOCKS])
        self._snapshot_bytes = self._log_bytes

    def _send(self, events: Sequence[KVEvent | msgspec.Raw]) -> None:
        # msgspec encodes a Raw as it is. Only decoders check the type of the events.
        batch = EventBatch(time.time(), cast(list[KVEvent], events))
        payload = self._encoder.encode(batch)
        number = self.totals.sequence
        if self._replay is not None:
            self._log.append(payload)
            self._log_bytes += len(payload)
        self._pub.send_multipart((self._topic, number.to_bytes(8), payload))
        self.totals.sequence = number + 1

    def _apply(self, events: list[KVEvent]) -> None:
        """Keep `_blocks` equal to the blocks that a subscriber knows after these events."""
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    for block in event.block_hashes:
                        del self._blocks[block]
                case _:
                    self._blocks.clear()

    def _store(self, event: BlockStored) -> None:
        """Add each block of the event as an event of its own."""
        size, parent = event.block_size, event.parent_block_hash
        for index, block in enumerate(event.block_hashes):
            extra = event.extra_keys[index : index + 1] if event.extra_keys else None
            one = msgspec.structs.replace(
                event,
                block_hashes=[block],
                parent_block_hash=parent,
                token_ids=event.token_ids[index * size : (index + 1) * size],
                extra_keys=extra if extra != [None] else None,
            )
            self._blocks[block] = msgspec.Raw(self._encoder.encode(one))
            parent = block

    def _send_replay(self, socket: "zmq.Socket[bytes]") -> None:
        """Answer one request: the messages from a sequence number on, and an end marker."""
        frames = socket.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return  # not a request of this protocol
        head = (frames[0], b"")
        first = int.from_bytes(frames[2])
        for number in range(first, len(self._log)):
            socket.send_multipart((*head, self._topic, number.to_bytes(8), self._log[number]))
        socket.send_multipart((*head, b"", _END, b""))


def _bind(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, address: str, max_queued: int
) -> "zmq.Socket[bytes]":
    """Bind a socket that queues `max_queued` messages for each peer. Raises ConfigError."""
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.set_hwm(max_queued)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(
            f"the KV events cannot be published at {address}: {error}; expected a free address "
            "such as tcp://*:5557"
        ) from None
    return socket
