"""Stream events per second that one core of the API process sends.

The application, uvicorn and the sockets are those of the server. A task replaces the engine and the
tokenizers: in each step it sends every request one token, encoded as a StepText message. The
clients run in another process, `minisgl bench online`. The benchmark measures the CPU time of each
process.
"""

import argparse
import asyncio
import gc
import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import uvloop

from minisgl.benchmark.flag_types import positive_int
from minisgl.core import ConfigError, EngineConfig, FinishReason, ModelFacts, SchedulerConfig
from minisgl.message.messages import (
    AddReq,
    Ready,
    SchedulerStats,
    StepText,
    TextUpdate,
    ToDetokenizer,
    ToGrammars,
    ToScheduler,
    ToTokenizer,
)
from minisgl.server.app import build_app
from minisgl.server.edge.server import HttpServer
from minisgl.server.engine import EngineView
from minisgl.server.observe.lifecycle import Lifecycle
from minisgl.server.observe.metrics import Metrics
from minisgl.settings import ServerConfig


class _Outbox:
    """A queue to a worker. It keeps the messages for the stub engine."""

    def __init__(self) -> None:
        self.sent: list[ToScheduler | ToTokenizer | ToDetokenizer | ToGrammars] = []

    def send(self, message: ToScheduler | ToTokenizer | ToDetokenizer | ToGrammars, /) -> int:
        self.sent.append(message)
        return 0


class _StubService:
    """The state that the application needs, with the stub engine in place of workers."""

    def __init__(self) -> None:
        self.config = ServerConfig(
            engine=EngineConfig(model_path="."), scheduler=SchedulerConfig(), served_names=("m",)
        )
        self.tokenizer, self.scheduler = _Outbox(), _Outbox()
        self.detokenizer = _Outbox()
        self.engine = EngineView(
            [self.tokenizer.send],
            self.detokenizer.send,
            self.scheduler.send,
            _Outbox().send,
            self.config.limits,
            Metrics("m"),
        )
        self.lifecycle = Lifecycle(frozenset({"scheduler"}))
        facts = ModelFacts(
            max_seq_len=2**20,
            vocab_size=1000,
            eos_token_ids=(),
            kv_capacity_tokens=2**20,
            page_size=16,
            device="none",
            dtype="none",
            kv_dtype="none",
        )
        self.lifecycle.on_ready(Ready(role="scheduler", facts=facts))
        self.stats: SchedulerStats | None = None


async def _all_submitted(
    service: _StubService, streams: int, clients: "subprocess.Popen[bytes]"
) -> None:
    while len(service.scheduler.sent) < streams:
        if clients.poll() is not None:
            raise ConfigError("the clients ended before all of their requests arrived")
        await asyncio.sleep(0.001)


async def _run_stub_engine(service: _StubService, tokens: int) -> None:
    """Send each request its tokens, one per step."""
    uids = [m.uid for m in service.scheduler.sent if isinstance(m, AddReq)]
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
        service.engine.receive(decoder.decode(frame))
        # This is the step time of a fast engine. Each stream wakes up once per step.
        await asyncio.sleep(0.002)


async def _measure(streams: int, tokens: int) -> tuple[float, float, dict[str, Any]]:
    """Return CPU seconds, elapsed seconds, and the summary of the clients."""
    service = _StubService()
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    server = HttpServer(build_app(service), service.config.limits, service.engine.metrics.on_limit)
    serving = asyncio.create_task(server.serve([listener]))
    load = (
        f"--requests {streams} --concurrency {streams} --prompt-tokens 4 4 --largest-id 9 --quiet"
    )
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    flags = [*load.split(), "--output-tokens", str(tokens), str(tokens), "--url", url]
    command = [sys.executable, "-m", "minisgl", "bench", "online", *flags]
    reader = subprocess.Popen(command, stdout=subprocess.PIPE)
    await _all_submitted(service, streams, reader)
    # The server also collects and freezes once it is ready.
    gc.collect()
    gc.freeze()
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    await _run_stub_engine(service, tokens)
    while service.engine.open_calls:
        await asyncio.sleep(0.001)
    cpu_s = time.process_time() - cpu_s
    wall_s = time.perf_counter() - wall_s
    server.should_exit = True
    await serving
    return cpu_s, wall_s, json.loads(reader.communicate()[0].splitlines()[-1])


def main(argv: Sequence[str]) -> int:
    """Print events per second and core, and one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench server", description=__doc__)
    parser.add_argument("--streams", type=positive_int, default=256, help="open streams (256)")
    parser.add_argument(
        "--tokens", type=positive_int, default=400, help="tokens of each stream (400)"
    )
    options = parser.parse_args(argv)
    cpu_s, wall_s, found = uvloop.run(_measure(options.streams, options.tokens))
    events = found["events"]
    print(
        f"{events:,} events, {options.streams} streams: {events / cpu_s:,.0f} events/s per core "
        f"({cpu_s / events * 1e6:.1f} us of CPU time each), {events / wall_s:,.0f} events/s "
        f"elapsed; the client takes {found['client_cpu_s'] / events * 1e6:.1f} us of CPU time each"
    )
    rates = {"events_per_cpu_s": events / cpu_s, "events_per_s": events / wall_s}
    kept = {name: found[name] for name in ("events", "client_cpu_s")}
    print(json.dumps({"streams": options.streams, **kept, **rates}))
    return 0
