"""How many stream events per second one core of the API process sends.

The app, uvicorn and real sockets; only the engine and the tokenizer are replaced, by a task that
sends every request its next token, as decoded from the bytes of a real StepText. The readers are
another process. What counts is this process's CPU time.
"""

import argparse
import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import msgspec
import uvicorn
import uvloop

from minisgl.core import EngineConfig, FinishReason, ModelFacts, SchedulerConfig
from minisgl.message import (
    AddReq,
    Ready,
    SchedulerStats,
    StepText,
    TextUpdate,
    Tokenized,
    TokenizeText,
    ToScheduler,
    ToTokenizer,
)
from minisgl.server import ServerConfig
from minisgl.server.app import build_app
from minisgl.server.client import EngineClient
from minisgl.server.connection import limited_protocol
from minisgl.server.lifecycle import Lifecycle
from minisgl.server.metrics import Metrics

_READER = """
import socket, sys, threading
port, streams, body = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].encode()
head = b"POST /v1/completions HTTP/1.1\\r\\nhost: x\\r\\nconnection: close\\r\\n"
counts = []
def read():
    events = 0
    with socket.create_connection(("127.0.0.1", port)) as s:
        s.sendall(head + b"content-length: %d\\r\\n\\r\\n" % len(body) + body)
        while data := s.recv(1 << 16):
            events += data.count(b'"text":" word"')
    counts.append(events)
threads = [threading.Thread(target=read) for _ in range(streams)]
for t in threads: t.start()
for t in threads: t.join()
print(sum(counts))
"""


class _Box:
    """An outbox whose messages the stub engine takes."""

    def __init__(self) -> None:
        self.sent: list[ToScheduler | ToTokenizer] = []

    def send(self, message: ToScheduler | ToTokenizer, /) -> None:
        self.sent.append(message)


class _Service:
    """A ready service around the stub."""

    def __init__(self) -> None:
        self.config = ServerConfig(
            engine=EngineConfig(model_path="."), scheduler=SchedulerConfig(), served_names=("m",)
        )
        self.tokenizer, self.scheduler = _Box(), _Box()
        metrics = Metrics("m")
        self.client = EngineClient([self.tokenizer], self.scheduler, self.config.limits, metrics)
        self.lifecycle = Lifecycle(frozenset({"scheduler"}))
        facts = ModelFacts(
            max_seq_len=2**20,
            vocab_size=1000,
            eos_token_ids=(),
            kv_capacity_tokens=2**20,
            page_size=16,
            device="none",
            dtype="none",
        )
        self.lifecycle.on_ready(Ready(role="scheduler", facts=facts))
        self.stats: SchedulerStats | None = None

    def stuck(self) -> bool:
        return False


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _play_engine(service: _Service, streams: int, tokens: int) -> None:
    """Answer every question; once all requests are there, give each its tokens step by step."""
    uids: list[int] = []
    while len(uids) < streams:
        await asyncio.sleep(0.001)
        for question in service.tokenizer.sent:
            assert isinstance(question, TokenizeText)
            answer = Tokenized(uid=question.uid, token_ids=b"\1\0\0\0")
            service.client.receive_answer(answer)
        service.tokenizer.sent.clear()
        uids += [m.uid for m in service.scheduler.sent if isinstance(m, AddReq)]
        service.scheduler.sent.clear()
    decoder = msgspec.msgpack.Decoder(StepText)
    for step in range(1, tokens + 1):
        finish = FinishReason.LENGTH if step == tokens else None
        updates = [
            TextUpdate(
                uid=uid,
                text=" word",
                completion_tokens=step,
                prompt_tokens=1,
                cached_tokens=0,
                finish=finish,
            )
            for uid in uids
        ]
        frame = msgspec.msgpack.encode(StepText(updates=updates))
        service.client.receive_text(decoder.decode(frame))
        await asyncio.sleep(0.002)  # a step of a fast engine: each stream wakes once per step


async def _measure(streams: int, tokens: int) -> tuple[float, float, int]:
    """CPU and wall seconds, and the events that were read."""
    service = _Service()
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    protocol = limited_protocol(service.config.limits)
    app = build_app(service)
    server = _Server(
        uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", http=protocol)
    )
    serving = asyncio.create_task(server.serve([listener]))
    body = {"model": "m", "prompt": "a", "max_tokens": tokens, "stream": True}
    port = str(listener.getsockname()[1])
    command = [sys.executable, "-c", _READER, port, str(streams), json.dumps(body)]
    reader = subprocess.Popen(command, stdout=subprocess.PIPE)
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    await _play_engine(service, streams, tokens)
    while service.client.open_generations:
        await asyncio.sleep(0.001)
    taken = time.process_time() - cpu_s, time.perf_counter() - wall_s
    server.should_exit = True
    await serving
    return *taken, int(reader.communicate()[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Print events per second and core."""
    parser = argparse.ArgumentParser(prog="minisgl bench server")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    options = parser.parse_args(argv)
    cpu_s, wall_s, events = uvloop.run(_measure(options.streams, options.tokens))
    print(
        f"{events:,} events, {options.streams} streams: {events / cpu_s:,.0f} events/s per core "
        f"({cpu_s / events * 1e6:.1f} us of CPU each), {events / wall_s:,.0f}/s by the clock"
    )
    return 0
