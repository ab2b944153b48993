"""The API server process: one event loop that runs uvicorn and the tasks of `ApiServer`.

_receive  reads the messages of all workers and passes them on
_watch    detects hung workers and overdue calls
_beat     sends keep-alive comments on idle streams, so that proxies keep them open
_drain    waits for the signal to drain, and then ends the process in phases
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import time
from typing import Any

import msgspec

from minisgl.core import DeadlineExceeded, EngineError, EngineFailure, ModelFacts, WorkerDied
from minisgl.message import messages
from minisgl.message.queues import AsyncReceiver, Sender, close_queues, endpoint
from minisgl.server.app import build_app
from minisgl.server.edge.guard import SPARE_CONNECTIONS
from minisgl.server.edge.open_files import allow_open_files
from minisgl.server.edge.probes import MOST_PROBE_CONNECTIONS, serve_probes
from minisgl.server.edge.server import HttpServer, TlsContext
from minisgl.server.engine import EngineOutput, EngineView
from minisgl.server.observe.lifecycle import Lifecycle, Phase, Watchdog, after_failure
from minisgl.server.observe.metrics import Metrics
from minisgl.server.render import facts_of
from minisgl.settings.child import ChildSpec
from minisgl.settings.config import ServerConfig
from minisgl.utils import log_event, process_age_s, supervise
from minisgl.utils.startup import startup_table, whole_start

logger = logging.getLogger(__name__)

_WATCH_INTERVAL_S = 0.5
_HUNG_NOTICE_S = 2.0  # /livez answers 503 for this long before a hung worker ends the service.
_KEEP_ALIVE_S = 15.0
# Longer than proxies keep an idle connection. The proxy must close it first, because only the proxy
# knows that it is about to send a request on the connection.
_IDLE_CONNECTION_S = 75
_FILES_PER_TOKENIZER = 3
_SEND_BUFFER_BYTES = 128 * 2**10
_ERROR_EVENTS_S = 2.0  # Time for the error events of open streams to leave after a failure.
_LATE_CALLS_S = 1.0  # Time for one more call of a client that does not know of the drain.


class ApiServer:
    """The state of the process. It is the `Service` that the routes read."""

    def __init__(self, spec: ChildSpec) -> None:
        self._spec = spec
        self.config: ServerConfig = spec.config
        config, directory = spec.config, spec.socket_dir
        self._scheduler: Sender[messages.ToScheduler] = Sender(
            endpoint(directory, "scheduler"), linger_ms=0 if config.render_only else 500
        )
        names = [f"tokenizer-{index}" for index in range(config.num_tokenizers)]
        detokenizer: Sender[messages.ToDetokenizer] = Sender(endpoint(directory, "detokenizer"))
        tokenizers: dict[str, Sender[messages.ToTokenizer]] = {
            name: Sender(endpoint(directory, name)) for name in names
        }
        grammars: Sender[messages.ToGrammars] = Sender(endpoint(directory, "grammars"))
        self._workers: dict[str, Sender[Any]] = {**tokenizers}
        roles, facts = {*names}, facts_of(config.engine) if config.render_only else None
        if not config.render_only:
            self._workers |= {"detokenizer": detokenizer, "grammars": grammars}
            ranks = [f"scheduler-{rank}" for rank in range(1, config.engine.tp_size)]
            roles |= {"detokenizer", "grammars", "scheduler", *ranks}
        keys = config.api_key_hashes | config.admin_key_hashes
        self.engine = EngineView(
            [sender.send for sender in tokenizers.values()],
            detokenizer.send,
            self._scheduler.send,
            grammars.send,
            config.limits,
            Metrics(
                config.served_names[0],
                config.commit,
                clients=keys.values() if config.key_metrics else (),
                render_only=config.render_only,
            ),
        )
        self.lifecycle = Lifecycle(frozenset(roles), facts)
        self.stats: messages.SchedulerStats | None = None
        self._watchdog = Watchdog(config.step_timeout_s)
        self._messages: AsyncReceiver[messages.ToApi] = AsyncReceiver(
            endpoint(directory, "api"), messages.ToApi
        )
        self._startup_s = {"download": spec.download_s}
        self._drain_asked = asyncio.Event()
        self._drain_grace_s = 0.0
        self._patience = asyncio.Timeout(None)  # a second signal lets it expire

    def hung_worker(self) -> str | None:
        """The name of a worker that has work and sends nothing for step_timeout_s, or None."""
        if self.lifecycle.phase is Phase.LOADING:
            return None
        now_s = time.monotonic()
        if self.engine.awaits_engine or (self.stats is not None and self.stats.busy):
            # A step of any request is progress.
            self._watchdog.expect("scheduler", now_s, self._step_tokens())
        else:
            self._watchdog.expect_nothing("scheduler")
        return self._watchdog.hung(now_s)

    def _step_tokens(self) -> int:
        """Tokens that a step may have on a CPU. On a GPU, the tokens of a step hardly take time."""
        facts, most = self.lifecycle.facts, self.config.scheduler.prefill_budget_tokens
        on_cpu = facts is not None and facts.device == "cpu"
        return min(most, self.engine.queued_tokens) if on_cpu else 0

    async def run(self, listener: socket.socket, *probe_listeners: socket.socket) -> None:
        """Serve until drained. Raises WorkerDied when the service cannot continue.

        listener, probe_listeners: the sockets of --port and, if given, of --probe-port.
        """
        for probe_listener in probe_listeners:
            serve_probes(self.lifecycle, probe_listener)
        loop = asyncio.get_running_loop()
        # SIGTERM comes from an orchestrator, which needs the grace period. For a Ctrl-C the
        # launcher sends SIGUSR2, because this process ignores SIGINT (worker_main).
        for number, grace_s in ((signal.SIGTERM, self.config.drain_grace_s), (signal.SIGUSR2, 0)):
            loop.add_signal_handler(number, self._ask_to_drain, number, grace_s)
        lost_worker = loop.create_future()  # The launcher sends SIGUSR1 when a worker has ended.
        lost = EngineError("another process of the service has ended")
        loop.add_signal_handler(signal.SIGUSR1, lost_worker.set_exception, lost)
        server = HttpServer(
            build_app(self),
            self.config.limits,
            self.engine.metrics.on_limit,
            ssl_context_factory=self._tls_context if self.config.ssl_certfile else None,
            idle_s=_IDLE_CONNECTION_S,
            timeout_graceful_shutdown=3,
        )
        loops = (self._receive, self._watch, self._beat, self._drain)
        tasks = {lost_worker, *(asyncio.create_task(run()) for run in loops)}
        serving = asyncio.create_task(server.serve([listener]))
        try:
            # The process ends as soon as one of these tasks ends, so that no task fails unnoticed.
            # Without the task that receives messages, for example, every client would hang.
            ended, _ = await asyncio.wait({*tasks, serving}, return_when=asyncio.FIRST_COMPLETED)
            if (failure := ended.pop().exception()) is not None:
                self._fail(failure)
                await self._settle(_ERROR_EVENTS_S)
                raise failure
            self._scheduler.send(messages.Shutdown())
        finally:
            loop.add_signal_handler(signal.SIGUSR1, lambda: None)  # The process is ending.
            server.should_exit = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, serving, return_exceptions=True)
            # uvicorn cancels handlers that take too long. Give them time to abort their requests. A
            # handler whose client does not read may not end at all.
            await asyncio.wait({serving, *server.server_state.tasks}, timeout=1)
            close_queues()

    def _tls_context(self, *_: object) -> ssl.SSLContext:
        limits, exceeded = self.config.limits, self.engine.metrics.on_limit
        context = TlsContext(ssl.PROTOCOL_TLS_SERVER, limits, exceeded)
        assert self.config.ssl_certfile is not None, "TLS must have a certificate; this is a bug"
        context.load_cert_chain(self.config.ssl_certfile, self.config.ssl_keyfile)
        return context

    async def _receive(self) -> None:
        while True:
            message = await self._messages.recv()
            now_s = time.monotonic()
            if isinstance(message, EngineOutput):
                for role in self.engine.receive(message):
                    self._watchdog.heard(role, now_s)
            elif isinstance(message, messages.Alive):
                self._watchdog.expect_nothing(message.role)
            elif isinstance(message, messages.SchedulerStats):
                # Without a step that is due, a message shows that the scheduler goes on.
                is_new = self.stats is None or message.step_id != self.stats.step_id
                if is_new or message.preparing:
                    self._watchdog.heard("scheduler", now_s)
                self.stats = message
                self.engine.metrics.on_stats(message)
            else:
                self._on_ready(message)

    def _on_ready(self, message: messages.Ready) -> None:
        self.engine.metrics.on_ready(message, self.config.engine.tp_size)
        if message.facts is not None:
            self._startup_s |= message.startup_s
        facts = self.lifecycle.on_ready(message)
        still_loading = ",".join(sorted(self.lifecycle.missing)) or "none"
        logger.info("ready role=%s still_loading=%s", message.role, still_loading)
        if facts is not None:
            # Objects from the start live as long as the process. The garbage collector skips them.
            gc.collect()
            gc.freeze()
            started = whole_start(self._startup_s, process_age_s(os.getppid()))
            self.engine.metrics.on_started(started)
            self._announce(facts, started)

    def _announce(self, facts: ModelFacts, started: dict[str, float]) -> None:
        """Tell the user that the server is ready, with its URL and the times of the start."""
        stream = sys.stderr if self.config.shell else sys.stdout
        if self.config.shell and not stream.isatty():
            return  # a script reads answers only
        does, details = "renders prompts of", f"context {facts.max_seq_len:,} tokens"
        if not self.config.render_only:
            capacity = f"KV capacity {facts.kv_capacity_tokens:,} tokens"
            does, details = "serves", f"{facts.device}, {facts.dtype}, {details}, {capacity}"
        line = (
            f"minisgl {does} {self.config.served_names[0]} at {self._spec.url}/v1 "
            f"({details}, tool format {facts.tool_format})"
        )
        if self.config.log_format == "json":
            seconds = {f"{phase}_s": round(phase_s, 2) for phase, phase_s in started.items()}
            log_event(logger, logging.INFO, "started", **seconds)
            logger.info(line)
            return
        with contextlib.suppress(OSError):  # The disk of the output may be full.
            os.write(stream.fileno(), f"{startup_table(started)}\n{line}\n".encode())

    async def _watch(self) -> None:
        """End the service when a worker is hung.

        /livez reports the hung worker for _HUNG_NOTICE_S before the service ends.
        """
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            self.engine.end_overdue(time.monotonic())
            if self.lifecycle.phase is not Phase.LOADING:
                # A worker that has not answered the last Ping receives no second Ping.
                for role, sender in self._workers.items():
                    if self._watchdog.expect(role, time.monotonic()):
                        sender.send(messages.Ping())
            hung = self.hung_worker()
            now_s = self.lifecycle.renewed_s = time.monotonic()
            is_stalled = self._watchdog.stalled("scheduler", now_s)
            self.lifecycle.hung = hung
            self.lifecycle.stalled = hung or ("scheduler" if is_stalled else None)
            if hung is not None:
                silent_s = self._watchdog.patience_s(hung)
                reason = f"the {hung} made no progress for {silent_s:g} s (--step-timeout)"
                logger.error(reason)
                await asyncio.sleep(_HUNG_NOTICE_S)
                if self.hung_worker() == hung:
                    raise WorkerDied(reason)

    async def _beat(self) -> None:
        """Keep proxies from closing streams whose requests wait in the queue."""
        while True:
            await asyncio.sleep(_KEEP_ALIVE_S)
            self.engine.send_keep_alives()

    def _fail(self, failure: BaseException) -> None:
        # While the model loads, the launcher logs the reason, as the last line of the log.
        level = logging.DEBUG if self.lifecycle.phase is Phase.LOADING else logging.ERROR
        self.lifecycle.phase = Phase.FAILED
        log_event(logger, level, "service failed", reason=failure)
        self.engine.fail_all(EngineFailure(f"the service has failed; {after_failure()}"))

    def _ask_to_drain(self, number: signal.Signals, grace_s: float) -> None:
        if self.lifecycle.phase is Phase.LOADING:  # There is nothing to drain.
            still_loading = ", ".join(sorted(self.lifecycle.missing))
            supervise.write_reason(self._spec.reason_fd, "api", still_loading)
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if self.lifecycle.phase in (Phase.GRACE, Phase.DRAINING):  # the second signal
            self._patience.reschedule(asyncio.get_running_loop().time())
        self._drain_grace_s = grace_s
        self._drain_asked.set()

    async def _drain(self) -> None:
        """Wait for the signal, then end the service in phases.

        GRACE: /readyz answers 503, and the server still accepts requests. DRAINING: the server
        refuses new requests (see Phase) and completes the open ones. CLOSED: the server ends the
        remaining requests with an error. A second signal begins CLOSED at once.
        """
        await self._drain_asked.wait()
        started_s = time.monotonic()
        self.lifecycle.phase = Phase.GRACE
        logger.info(
            "draining open_requests=%d: waiting for them, at most %g s; a second Ctrl-C or SIGTERM "
            "ends the service at once",
            self.engine.open_calls,
            self.config.drain_timeout_s,
        )
        with contextlib.suppress(TimeoutError):  # the second signal ends the wait
            async with self._patience:
                await asyncio.sleep(min(self._drain_grace_s, self.config.drain_timeout_s))
                self.lifecycle.phase = Phase.DRAINING
                left_s = self.config.drain_timeout_s - (time.monotonic() - started_s)
                await self._settle(left_s, min(_LATE_CALLS_S, self._drain_grace_s))
        self.lifecycle.phase = Phase.CLOSED
        if self.engine.open_calls:
            logger.warning("ending open_requests=%d", self.engine.open_calls)
            self.engine.fail_all(DeadlineExceeded("the server is shutting down"))
            await self._settle(_ERROR_EVENTS_S)
        logger.info("drained")

    async def _settle(self, timeout_s: float, quiet_s: float = 0.0) -> None:
        """Wait until no call is open and the last `quiet_s` have passed without an open call.

        Returns after `timeout_s` at the latest.
        """
        busy_s = time.monotonic()
        deadline_s = busy_s + timeout_s
        while (now_s := time.monotonic()) < deadline_s:
            if self.engine.open_calls:
                busy_s = now_s
            elif now_s - busy_s >= quiet_s:
                return
            await asyncio.sleep(0.02)


def run_api(spec: ChildSpec) -> None:
    """The main of the API server process: serve on the inherited socket until drained."""
    assert spec.listen_fds, "the API server must have a socket; this is a bug"
    gc.freeze()  # imports leave no garbage, so the collection at "ready" may skip their objects
    gc.enable()
    others = SPARE_CONNECTIONS + MOST_PROBE_CONNECTIONS
    others += _FILES_PER_TOKENIZER * spec.config.num_tokenizers
    limits = allow_open_files(spec.config.limits, others)
    config = msgspec.structs.replace(spec.config, limits=limits)
    listeners = [socket.socket(fileno=fd) for fd in spec.listen_fds]
    timeout_ms = round(limits.read_timeout_s * 1000)
    for listener in listeners:
        # Accepted sockets inherit the options of the listener. uvloop sets TCP_NODELAY by itself.
        # Data that a client does not read stays in a buffer of this size. After read_timeout_s the
        # kernel closes the connection.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)

    async def main() -> None:
        await ApiServer(msgspec.structs.replace(spec, config=config)).run(*listeners)

    import uvloop

    uvloop.run(main())
