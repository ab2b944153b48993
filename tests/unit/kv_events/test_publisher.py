"""The event stream on its sockets: messages, replays, late and slow subscribers."""

import json
import os
import random
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from k8s_harness.incluster.kv_index import BlockIndex

from minisgl.core import ConfigError
from minisgl.core.rows import Steps
from minisgl.kv_events import publisher as module
from minisgl.kv_events.messages import BlockRemoved, BlockStored, EventBatch, KVEvent
from minisgl.kv_events.publisher import Publisher
from minisgl.kvcache.radix import RadixCache
from tests.patience import patience
from tests.unit.kv_events import golden
from tests.unit.kv_events.machine import addresses, raise_it, started


@pytest.fixture
def publisher() -> Publisher:
    return Publisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", golden.TOPIC)


def subscribe(publisher: Publisher) -> "zmq.Socket[bytes]":
    """A SUB socket that receives the stream; returns when the publisher knows of it."""
    context = zmq.Context.instance()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVTIMEO, int(patience() * 1000))
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    socket.subscribe(b"kv@")
    socket.connect(addresses(publisher)[0])
    assert monitor.poll(int(patience() * 1000))
    socket.disable_monitor()
    return socket


def replay(address: str, first: int) -> list[tuple[int, EventBatch]]:
    """Ask for the messages from `first` on, as llm-d's subscriber does."""
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, int(patience() * 1000))
        socket.connect(address)
        socket.send_multipart([b"", first.to_bytes(8)])
        found = []
        while True:
            empty, _, number, payload = socket.recv_multipart()
            assert empty == b""
            if not payload:
                assert number == b"\xff" * 8
                return found
            batch = msgspec.msgpack.decode(payload, type=EventBatch)
            found.append((int.from_bytes(number), batch))


def stored(token: int, parent: int | None = None) -> KVEvent:
    return BlockStored(
        block_hashes=[2**63 + token],
        parent_block_hash=parent,
        token_ids=[token, token],
        block_size=2,
        lora_id=None,
        medium="GPU",
        lora_name=None,
    )


def test_the_messages_are_those_that_the_decoder_of_llm_d_has_read() -> None:
    rows = json.loads(Path(__file__).with_name("golden.json").read_text())
    assert [row["payload"] for row in rows] == [payload.hex() for payload in golden.messages()]
    for row, payload in zip(rows, golden.messages(), strict=True):
        assert (row["pod"], row["model"]) == tuple(golden.TOPIC.split("@")[1:])
        _, (event,), _ = msgspec.msgpack.decode(payload)
        read = row["event"]
        assert row["kind"] == event["type"] + "Event"
        assert event.get("block_hashes", []) == read.get("BlockHashes", [])
        assert event.get("token_ids", []) == read.get("Tokens", [])
        assert (event.get("parent_block_hash") or 0) == read.get("ParentHash", 0)
        assert event.get("extra_keys") == read.get("ExtraKeys")
        assert event.get("block_size") == read.get("BlockSize")


def test_a_subscriber_rebuilds_the_cache_from_the_stream(publisher: Publisher) -> None:
    events = started(publisher, 4, "model", 2, 60)
    cache, index = RadixCache(2, Steps(), [events]), BlockIndex()
    socket = subscribe(publisher)
    draw = random.Random(0)
    free = [*range(60)]
    sent = 0
    for _ in range(300):
        tokens = np.array([draw.randrange(2) for _ in range(20)], dtype=np.int32)
        while len(free) < 10:
            free += [page for gone in cache.evict(1) for page in gone.pages.tolist()]
        pages = np.array(free[:10], dtype=np.int32)
        kept = cache.insert(tokens, pages).prefix_pages()
        free = [page for page in free if page not in kept]
        pending = bool(events._pending)
        events.flush()
        sent += pending
    for number in range(sent):
        topic, sequence, payload = socket.recv_multipart()
        assert (topic, sequence) == (golden.TOPIC.encode(), number.to_bytes(8))
        for event in msgspec.msgpack.decode(payload, type=EventBatch).events:
            index.apply(event)
    assert (index.blocks, index.checksum) == (events.totals.blocks, events.totals.checksum)
    assert index.blocks > 0
    assert [number for number, _ in replay(addresses(publisher)[1], sent - 2)] == [
        sent - 2,
        sent - 1,
    ]
    socket.close()


def test_a_long_stream_begins_anew_with_a_snapshot(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay from number 0 therefore always has every block."""
    monkeypatch.setattr(module, "MAX_REPLAYED", 20)
    monkeypatch.setattr(module, "_SNAPSHOT_BLOCKS", 4)
    socket = subscribe(publisher)
    publisher.start(raise_it)
    live, last = BlockIndex(), -1
    restarts = 0
    for token in range(50):
        assert publisher.put([stored(token, 2**63 + token - 1 if token % 7 else None)])
        if token % 7 == 6:
            assert publisher.put([BlockRemoved(block_hashes=[2**63 + token], medium="GPU")])
    while 2**63 + 49 not in live._keys:
        _, number, payload = socket.recv_multipart()
        restarts += int.from_bytes(number) < last
        last = int.from_bytes(number)
        for event in msgspec.msgpack.decode(payload, type=EventBatch).events:
            live.apply(event)
    assert restarts >= 2
    messages = replay(addresses(publisher)[1], 0)
    assert [number for number, _ in messages] == [*range(len(messages))]
    late = BlockIndex()
    for _, batch in messages:
        for event in batch.events:
            late.apply(event)
    assert late.orphans == 0
    assert (late.blocks, late.checksum) == (live.blocks, live.checksum)
    assert late.blocks == 50 - 7
    socket.close()


def test_a_full_queue_refuses_a_batch_at_once(publisher: Publisher) -> None:
    """The thread has not started, so nothing leaves the queue."""
    for token in range(module.MAX_QUEUED):
        assert publisher.put([stored(token)])
    assert not publisher.put([stored(0)])
    publisher.start(raise_it)


def test_the_publisher_does_not_wait_for_a_subscriber_that_reads_nothing(
    publisher: Publisher,
) -> None:
    idle = subscribe(publisher)
    publisher.start(raise_it)
    large = BlockStored(
        block_hashes=[2**63],
        parent_block_hash=None,
        token_ids=[7] * 20_000,
        block_size=20_000,
        lora_id=None,
        medium="GPU",
        lora_name=None,
    )
    for _ in range(500):  # 10 MB, more than the buffers of the connection
        assert publisher.put([large])
    assert len(replay(addresses(publisher)[1], 0)) <= 500
    idle.close()


def test_a_request_that_is_no_replay_request_gets_no_answer(publisher: Publisher) -> None:
    publisher.start(raise_it)
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.connect(addresses(publisher)[1])
        socket.send_multipart([b"", b"short"])
        socket.send_multipart([b"alone"])
    assert replay(addresses(publisher)[1], 0) == []


def test_a_taken_address_is_an_error_that_names_it(publisher: Publisher) -> None:
    address = addresses(publisher)[0]
    with pytest.raises(ConfigError, match=r"cannot be published at tcp://127\.0\.0\.1:"):
        Publisher(address, None, "kv@a@b")


@pytest.mark.parametrize("index", [0, 1])
def test_a_peer_that_sends_a_large_message_is_disconnected(
    publisher: Publisher, index: int
) -> None:
    """zmq would hold the message in the memory of the scheduler."""
    publisher.start(raise_it)
    host, port = addresses(publisher)[index].removeprefix("tcp://").split(":")
    kind = (b"SUB", b"DEALER")[index]
    ready = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4) + kind
    with socket.create_connection((host, int(port)), timeout=patience()) as peer:
        peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        peer.sendall(bytes([4, len(ready)]) + ready)
        peer.sendall(b"\x02" + (2**20).to_bytes(8))  # the head of a message of 1 MiB
        with suppress(ConnectionResetError):
            while peer.recv(4096):
                pass
    assert replay(addresses(publisher)[1], 0) == []


UNENCODABLE = b"Encoding objects of type object is unsupported"
FAILING = """
import sys, threading
from functools import partial
from types import SimpleNamespace
from minisgl.kv_events.publisher import Publisher
from minisgl.launch.worker_main import fail

spec = SimpleNamespace(name="scheduler", reason_fd=int(sys.argv[1]))
publisher = Publisher("tcp://127.0.0.1:*", None, "kv@a@b")
publisher.start(partial(fail, spec))
publisher.put([object()])  # msgspec cannot encode it
threading.Event().wait()
"""


def test_a_failure_of_the_thread_ends_the_process_with_its_reason() -> None:
    """Otherwise the service would go on without the stream, and no subscriber would notice."""
    read_fd, write_fd = os.pipe()
    with os.fdopen(read_fd, "rb") as reasons:
        done = subprocess.run(
            [sys.executable, "-c", FAILING, str(write_fd)],
            pass_fds=[write_fd],
            capture_output=True,
            text=True,
            timeout=patience(60),
            check=False,
        )
        os.close(write_fd)
        assert reasons.read() == b"scheduler\tTypeError: " + UNENCODABLE + b"\n"
    assert done.returncode == 1
    assert "process failed" in done.stderr


CLOSES = """
import threading

from minisgl.kv_events.publisher import Publisher
from minisgl.message.queues import close_queues

publisher = Publisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "kv@a@b")
publisher.start(print)
(thread,) = [each for each in threading.enumerate() if each.name == "kv-events"]
close_queues()
publisher.put([])
while thread.is_alive() and not publisher.totals.sequence:
    thread.join(0.01)
"""


def test_the_end_of_the_queues_of_a_process_does_not_fail_the_thread() -> None:
    """Regression: the thread of a drained server ended the process with a ZMQError."""
    done = subprocess.run(
        [sys.executable, "-c", CLOSES], capture_output=True, text=True, timeout=patience(60)
    )
    assert (done.stdout, done.stderr) == ("", "")
