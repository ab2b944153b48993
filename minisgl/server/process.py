"""The API server process: one event loop with uvicorn, the receiver of all messages, the watch."""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator

import uvicorn

from minisgl.core import DeadlineExceeded, EngineError, ModelFacts, WorkerDied
from minisgl.message import (
    Alive,
    AsyncReceiver,
    Ping,
    Ready,
    SchedulerStats,
    Sender,
    Shutdown,
    StepText,
    ToApi,
    TokenizeResult,
    ToScheduler,
    ToTokenizer,
    endpoint,
)
from minisgl.server.app import build_app
from minisgl.server.config import ChildSpec, ServerConfig
from minisgl.server.connection import limited_protocol
from minisgl.server.engine_client import EngineClient
from minisgl.server.errors import EngineFailure
from minisgl.server.lifecycle import Lifecycle, Phase, Watchdog
from minisgl.server.metrics import Metrics
from minisgl.utils import process_age_s, supervise

logger = logging.getLogger(__name__)

_WATCH_INTERVAL_S = 0.5
_STUCK_NOTICE_S = 2.0  # livez answers 503 for so long before a hang ends the service
_KEEP_ALIVE_S = 15.0
# Longer than proxies keep one: they are to close it, as it is they who send.
_IDLE_CONNECTION_S = 75
_SEND_BUFFER_BYTES = 128 * 2**10
_OTHER_FILES = 512  # some 60 of our own, and the connections that `limited_protocol` has to spare
_LAST_WORDS_S = 2.0  # for error chunks to leave once everything has failed
_FAREWELL_S = 1.0  # for the next call of a client whose last answer began before the drain


class _Server(uvicorn.Server):
    """Without uvicorn's signal handlers: ours drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ApiServer:
    """State of the process; `build_app` reads config, client, lifecycle and `stuck`."""

    def __init__(self, spec: ChildSpec) -> None:
        config = spec.config
        self.config: ServerConfig = config
        directory = spec.socket_dir
        self._scheduler: Sender[ToScheduler] = Sender(endpoint(directory, "scheduler"))
        names = [f"tokenizer-{index}" for index in range(config.num_tokenizers)]
        self._workers: dict[str, Sender[ToTokenizer]] = {
            name: Sender(endpoint(directory, name)) for name in (*names, "detokenizer")
        }
        metrics = Metrics(config.served_names[0], config.commit)
        outboxes = [self._workers[name].send for name in names]
        self.client = EngineClient(outboxes, self._scheduler.send, config.limits, metrics)
        ranks = [f"scheduler-{rank}" for rank in range(1, config.engine.tp_size)]
        self.lifecycle = Lifecycle(frozenset({*names, *ranks, "detokenizer", "scheduler"}))
        self.stats: SchedulerStats | None = None
        self._pulse = Watchdog(config.step_timeout_s)
        self._url = spec.url
        self._reason_fd = spec.reason_fd
        self._messages: AsyncReceiver[ToApi] = AsyncReceiver(endpoint(directory, "api"), ToApi)
        self._drain_asked = asyncio.Event()
        self._drain_grace_s = 0.0

    def stuck(self) -> bool:
        """Some process has work and has done none of it for step_timeout_s."""
        return self._hanging() is not None

    def stalled(self) -> bool:
        """The scheduler has work and makes no step, so that /readyz asks for no new requests."""
        return self.stuck() or self._pulse.stalled("scheduler", time.monotonic())

    def _hanging(self) -> str | None:
        if self.lifecycle.phase is Phase.LOADING:
            return None
        now_s = time.monotonic()
        if self.client.awaits_engine or (self.stats is not None and self.stats.busy):
            self._pulse.expect("scheduler", now_s)  # a step, of whatever request
        else:
            self._pulse.satisfied("scheduler")
        return self._pulse.hanging(now_s)

    async def run(self, listener: socket.socket) -> None:
        """Serve until drained. Raises WorkerDied when the service cannot go on."""
        loop = asyncio.get_running_loop()
        # SIGTERM comes from an orchestrator, which needs the grace. SIGUSR2 is a person's Ctrl-C:
        # a SIGINT before this line would end in Python's own traceback.
        for number, grace_s in ((signal.SIGTERM, self.config.drain_grace_s), (signal.SIGUSR2, 0)):
            loop.add_signal_handler(number, self._ask_to_drain, number, grace_s)
        neighbours = loop.create_future()
        lost = EngineError("another process of the service has ended")
        loop.add_signal_handler(signal.SIGUSR1, neighbours.set_exception, lost)
        server = _Server(
            uvicorn.Config(
                build_app(self),
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                http=limited_protocol(
                    self.config.limits, self.client.metrics.on_limit, lambda: self.lifecycle.leaving
                ),
                ws="none",
                loop="uvloop",
                ssl_certfile=self.config.ssl_certfile,
                ssl_keyfile=self.config.ssl_keyfile,
                timeout_keep_alive=_IDLE_CONNECTION_S,
                timeout_graceful_shutdown=3,
            )
        )
        works = (self._receive, self._watch, self._beat, self._drain)
        tasks = {neighbours, *(asyncio.create_task(work()) for work in works)}
        serving = asyncio.create_task(server.serve([listener]))
        try:
            # Each of these runs for ever unless it is the end: none may die unseen (W27).
            await asyncio.wait({*tasks, serving}, return_when=asyncio.FIRST_COMPLETED)
            ended = next((t for t in {*tasks, serving} if t.done()), serving)
            if (failure := ended.exception()) is not None:
                self._fail(failure)
                await self._settle(_LAST_WORDS_S)
                raise failure
            self._scheduler.send(Shutdown())
        finally:
            loop.add_signal_handler(signal.SIGUSR1, lambda: None)  # this is the end already
            server.should_exit = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, serving, return_exceptions=True)
            # Who takes too long is cancelled, and aborts what it asked for, or waits for a reader.
            await asyncio.wait({serving, *server.server_state.tasks}, timeout=1)
            self._scheduler.close(linger_ms=500)

    async def _receive(self) -> None:
        while True:
            message = await self._messages.recv()
            now_s = time.monotonic()
            if isinstance(message, StepText):
                self._pulse.heard("scheduler", now_s)
                self._pulse.heard("detokenizer", now_s)
                self.client.receive_text(message)
            elif isinstance(message, TokenizeResult):
                worker = self.client.receive_answer(message)
                self._pulse.heard(f"tokenizer-{worker}", now_s)
            elif isinstance(message, Alive):
                self._pulse.satisfied(message.role)
            elif isinstance(message, SchedulerStats):
                if self.stats is None or message.step_id != self.stats.step_id:
                    self._pulse.heard("scheduler", now_s)
                self.stats = message
                self.client.metrics.on_stats(message)
            else:
                self._on_ready(message)

    def _on_ready(self, message: Ready) -> None:
        self.client.metrics.on_ready(message, self.config.engine.tp_size)
        facts = self.lifecycle.on_ready(message)
        still_loading = ",".join(sorted(self.lifecycle.missing)) or "none"
        logger.info("ready role=%s still_loading=%s", message.role, still_loading)
        if facts is not None:
            # What lives now lives for good; the collector need not walk it again.
            gc.collect()
            gc.freeze()
            self.client.metrics.on_started("total", process_age_s(os.getppid()))
            self._announce(facts)

    def _announce(self, facts: ModelFacts) -> None:
        """The one line that says that, and where, minisgl serves."""
        if self.config.shell:
            return
        line = (
            f"minisgl serves {self.config.served_names[0]} at {self._url}/v1 "
            f"({facts.device}, {facts.dtype}, context {facts.max_seq_len:,} tokens, "
            f"KV capacity {facts.kv_capacity_tokens:,} tokens)"
        )
        if self.config.log_format == "json":
            logger.info(line)
        else:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    async def _watch(self) -> None:
        """End the service when a process hangs; first let livez say so for a moment."""
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            self.client.end_overdue(time.monotonic())
            if self.lifecycle.phase is not Phase.LOADING:
                for role, sender in self._workers.items():
                    if self._pulse.expect(role, time.monotonic()):
                        sender.send(Ping())
            hanging = self._hanging()
            if hanging is not None:
                most = f"more than {self.config.step_timeout_s:g} s (--step-timeout)"
                late = f"the {hanging} made no progress for {most}"
                logger.error(late)
                await asyncio.sleep(_STUCK_NOTICE_S)
                if self._hanging() == hanging:
                    raise WorkerDied(late)

    async def _beat(self) -> None:
        """Streams must not look dead to proxies while their request waits for its turn."""
        while True:
            await asyncio.sleep(_KEEP_ALIVE_S)
            self.client.beat()

    def _fail(self, failure: BaseException) -> None:
        # while loading, the launcher's one line says why, and should be the last one
        level = logging.DEBUG if self.lifecycle.phase is Phase.LOADING else logging.ERROR
        self.lifecycle.phase = Phase.FAILED
        logger.log(level, "service failed reason=%s", failure)
        self.client.fail_all(EngineFailure("the engine has failed; the service restarts"))

    def _ask_to_drain(self, number: signal.Signals, grace_s: float) -> None:
        if self.lifecycle.phase is Phase.LOADING:  # there is nothing to drain
            still_loading = ", ".join(sorted(self.lifecycle.missing))
            supervise.write_reason(self._reason_fd, "api", still_loading)
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._drain_grace_s = grace_s
        self._drain_asked.set()

    async def _drain(self) -> None:
        """Unready at once, accept for a grace, then refuse, finish, and at last end."""
        await self._drain_asked.wait()
        started_s = time.monotonic()
        self.lifecycle.phase = Phase.GRACE
        logger.info("draining open_requests=%d", self.client.open_generations)
        await asyncio.sleep(min(self._drain_grace_s, self.config.drain_timeout_s))
        self.lifecycle.phase = Phase.DRAINING
        left_s = self.config.drain_timeout_s - (time.monotonic() - started_s)
        await self._settle(left_s, min(_FAREWELL_S, self._drain_grace_s))
        self.lifecycle.phase = Phase.CLOSED
        if self.client.open_generations:
            logger.warning("drain deadline open_requests=%d", self.client.open_generations)
            self.client.fail_all(DeadlineExceeded("the server is shutting down"))
            await self._settle(_LAST_WORDS_S)
        logger.info("drained")

    async def _settle(self, timeout_s: float, quiet_s: float = 0.0) -> None:
        """Wait until no call has been open for `quiet_s`, at most `timeout_s`."""
        busy_s = time.monotonic()
        deadline_s = busy_s + timeout_s
        while (now_s := time.monotonic()) < deadline_s:
            if self.client.open_generations:
                busy_s = now_s
            elif now_s - busy_s >= quiet_s:
                return
            await asyncio.sleep(0.02)


def run_api(spec: ChildSpec) -> None:
    """Serve on the inherited socket until drained."""
    assert spec.listen_fd is not None, "the API server has no socket; this is a bug"
    # Most systems start processes with room for 1,024 files, fewer than --max-connections. With
    # room for many more, TLS handshakes that nobody ends, and nobody counts, would fill memory.
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = min(most_files, spec.config.limits.max_connections + _OTHER_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    listener = socket.socket(fileno=spec.listen_fd)
    # Events are small and must leave at once (Nagle); accepted sockets inherit it.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # What a client does not read waits in buffers of bounded size, and only for so long.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    timeout_ms = round(spec.config.limits.read_timeout_s * 1000)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)

    async def main() -> None:
        await ApiServer(spec).run(listener)

    import uvloop

    uvloop.run(main())
