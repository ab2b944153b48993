"""The launcher: binds the port, starts the children, and ends all of them when one ends.

    api, tokenizer-0.., detokenizer, grammars, scheduler, scheduler-1..  (and the shell: --shell)

The launcher does not load torch and holds no requests. It may run as PID 1 of a container.

If the service fails, the last line of the log is the reason. Kubernetes shows the last 2,048 bytes
of the log as the termination message.
"""

import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from minisgl.core import ConfigError
from minisgl.settings.child import CHILD_COMMAND, ChildSpec
from minisgl.settings.config import DEMO_NAME, ServerConfig
from minisgl.settings.keys import key_hashes
from minisgl.utils import process_age_s, setup_logging, socket_folder, supervise

logger = logging.getLogger(__name__)

_SHELL_COMMAND = (sys.executable, "-m", "minisgl.shell")
_FAILED_EXIT = 1
# Exit codes of an API server that was asked to stop: 0 after a drain, and the
# negative number of the signal if the server was still loading.
_STOPPED_EXITS = (0, -signal.SIGTERM, -signal.SIGUSR2)
_SCHEDULER_GRACE_S = 5.0  # time for the schedulers to end after their Shutdown message
_TERM_GRACE_S = 3.0  # time from SIGTERM to SIGKILL
# Time for the API server to end after the failure of another process or a second signal. It first
# sends error events to the open streams.
_API_FAILURE_EXIT_S = 4.0
# Time for the API server to end after --drain-timeout: 2 s to send error events, 3 s to close
# connections, and 3 s to spare.
_DRAIN_MARGIN_S = 8.0
_PROBE_TIMEOUT_S = 2.0  # for a server that has the port
_SAME_SIGNAL_S = 0.2  # two signals within this time count as one


def launch(
    config: ServerConfig,
    scheduler_command: Sequence[str] = CHILD_COMMAND,
    *,
    download_s: float = 0.0,
) -> int:
    """Serve until a signal or a failure ends the service, and return the exit code.

    scheduler_command: starts a scheduler process; tests pass the command of a stub.
    download_s: seconds in which the caller found or downloaded the model.

    Raises ConfigError if the port is taken or the folder for the sockets cannot be created.
    """
    setup_logging("launcher", "info", config.log_format)
    shell_key = secrets.token_urlsafe() if config.shell and config.api_key_hashes else ""
    if shell_key:
        hashes = config.api_key_hashes | key_hashes([shell_key], None)
        config = msgspec.structs.replace(config, api_key_hashes=hashes)
    with contextlib.ExitStack() as stack:
        try:
            socket_dir = stack.enter_context(socket_folder())
        except OSError as error:
            raise ConfigError(
                f"no folder for the sockets can be made: {error}; mount a writable /tmp or set "
                "TMPDIR"
            ) from None
        reason_read, reason_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        ports = [port for port in (config.port, config.probe_port) if port is not None]
        listeners = [stack.enter_context(_bind(config.host, port)) for port in ports]
        supervisor = supervise.Supervisor()
        stack.callback(supervisor.kill)
        template = ChildSpec(
            role="",
            index=0,
            socket_dir=socket_dir,
            reason_fd=reason_write,
            report_fd=supervisor.report_fd,
            config=config,
            url=_url(listeners[0].getsockname(), "https" if config.ssl_certfile else "http"),
            download_s=download_s,
        )
        service = _Service(supervisor, template, reason_read, scheduler_command)
        service.start(listeners, shell_key)
        return service.run()


def join_running_server(config: ServerConfig, environ: Mapping[str, str]) -> None:
    """With --shell, become a chat with the minisgl server that has the port. Returns without one.

    If the user has named a model, the chat asks for this model.

    environ: variables for the chat, which may include the key of the server.
    """
    if not config.shell or (url := _running_server(config.host, config.port)) is None:
        return
    logger.info(f"chatting with the running server at {url}")
    logging.shutdown()
    (name, *_), default = config.served_names, (DEMO_NAME,)
    named = [] if config.served_names == default else ["--model", name]
    os.execve(sys.executable, [*_SHELL_COMMAND, "--url", url, *named], dict(environ))


@dataclass(eq=False)
class _Service:
    """The children of one launch, and the reaction to each signal and to each exit.

    _stop_asked_s: time of the first request to stop, on CLOCK_MONOTONIC; None before it.
    _stop_signal: the signal that requested the stop; None if the end of the shell requested it.
    _unchecked: number of children that have not reported that the configuration has no fault.
    _listening: lines that are logged when all these children have reported.
    """

    _supervisor: supervise.Supervisor
    _template: ChildSpec
    _reason_fd: int
    _scheduler_command: Sequence[str]
    _stop_asked_s: float | None = None
    _stop_signal: signal.Signals | None = None
    _shell: supervise.Child | None = None
    _api: supervise.Child = field(init=False)
    _listening: list[str] = field(default_factory=list)
    _unchecked: int = 0

    def start(self, listeners: Sequence[socket.socket], shell_key: str) -> None:
        """Start all children, the schedulers first, because they take the longest to load.

        The API server starts next, so that /livez answers while the others load. The children
        check the configuration. When all have reported that they found no fault, the log says
        "listening".
        """
        config = self._template.config
        logger.info(f"loading {config.served_names[0]} from {config.engine.model_path}")
        self._listening = [f"listening on {self._template.url} (not ready yet)"]
        probes = (_url(listener.getsockname()) for listener in listeners[1:])
        self._listening += [f"listening for probes on {url}" for url in probes]
        self._unchecked = config.num_tokenizers + (0 if config.render_only else 1)
        for rank in range(0 if config.render_only else config.engine.tp_size):
            self._spawn("scheduler", rank)
        self._api = self._spawn("api", 0, *(listener.fileno() for listener in listeners))
        # A second open listener would accept connections after the API server has ended.
        for listener in listeners:
            listener.close()
        for index in range(config.num_tokenizers):
            self._spawn("tokenizer", index)
        if not config.render_only:
            self._spawn("detokenizer", 0)
            self._spawn("grammars", 0)
        if config.shell:
            # The shell stays in the launcher's process group, so that it may read the terminal and
            # receives Ctrl-C.
            command = [*_SHELL_COMMAND, "--url", self._template.url]
            command += ["--model", config.served_names[0]]
            environ = {**os.environ, "MINISGL_API_KEY": shell_key}
            shell = subprocess.Popen(command, env=environ)
            self._shell = self._supervisor.adopt(supervise.Child("shell", shell))

    def _spawn(self, role: str, index: int, *listen_fds: int) -> supervise.Child:
        changed = {"role": role, "index": index, "listen_fds": listen_fds}
        spec = msgspec.structs.replace(self._template, **changed)
        command = self._scheduler_command if role == "scheduler" else CHILD_COMMAND
        return self._supervisor.adopt(spec.spawn(command))

    def _on_report(self) -> None:
        self._unchecked -= 1
        if not self._unchecked:
            for line in self._listening:
                logger.info(line)

    def run(self) -> int:
        """Handle signals and exits until the service has ended, and return the exit code."""
        while True:
            drained_by_s = None  # deadline for the end of the API server
            if self._stop_asked_s is not None:
                allowed_s = self._template.config.drain_timeout_s + _DRAIN_MARGIN_S
                drained_by_s = self._stop_asked_s + allowed_s
            events = self._supervisor.wait(drained_by_s)
            if not events:
                self._supervisor.kill()
                logger.error("error: the API server did not end by its drain deadline")
                return _FAILED_EXIT
            for event in events:
                match event:
                    case supervise.Child():
                        code = self._on_exit(event)
                    case signal.Signals():
                        code = self._on_signal(event)
                    case None:
                        self._on_report()
                        continue
                if code is not None:
                    return code

    def _ask_to_stop(self, number: signal.Signals | None) -> None:
        """Begin the drain. Only SIGTERM gives the grace period.

        number: the signal that asks for the stop; None: the shell has ended.
        """
        self._stop_asked_s = time.monotonic()
        self._stop_signal = number
        graceful = number is signal.SIGTERM
        self._supervisor.send_signal(self._api, signal.SIGTERM if graceful else signal.SIGUSR2)

    def _on_signal(self, number: signal.Signals) -> int | None:
        if self._shell is not None and number is signal.SIGINT:
            return None  # the shell handles Ctrl-C
        if self._stop_asked_s is None:
            self._ask_to_stop(number)
            return None
        # Terminals, shells and `timeout` may signal this process and then its process group. Two
        # signals then arrive, which count as one request to stop.
        if number is signal.SIGHUP or time.monotonic() - self._stop_asked_s < _SAME_SIGNAL_S:
            return None
        logger.info("stopping at once")
        # The API server first sends error events to the open streams.
        self._supervisor.send_signal(self._api, signal.SIGUSR2)
        self._supervisor.join([self._api], _API_FAILURE_EXIT_S)
        self._supervisor.kill()
        return 128 + number

    def _on_exit(self, child: supervise.Child) -> int | None:
        stopping = self._stop_asked_s is not None
        if child is self._shell:
            self._ask_to_stop(None)
            return None
        if stopping and child is self._api and child.exit_code in _STOPPED_EXITS:
            return self._end_stopped(stopped_while_loading=child.exit_code != 0)
        if stopping and child.exit_code == 0:
            return None  # a scheduler that ended by its Shutdown message
        return self._fail(child)

    def _end_stopped(self, stopped_while_loading: bool) -> int:
        """End the other children, and return the exit code of the service.

        It is 0 after a drain, and 128 + signal if the signal came while the model was loading.
        """
        if not stopped_while_loading:
            self._supervisor.join(self._schedulers(), _SCHEDULER_GRACE_S)
        self._supervisor.stop(_TERM_GRACE_S)
        if not stopped_while_loading or self._stop_signal is None:
            return 0
        if self._stop_signal is signal.SIGTERM:
            reasons = supervise.read_reasons(self._reason_fd)
            loading = reasons.get(self._api.role, "all processes")
            logger.error(
                f"error: SIGTERM ended the start after {process_age_s(os.getpid()):.0f} s, while "
                f"still loading: {loading}; if Kubernetes sent it, the startup probe allows too "
                "little time: raise startup.budgetSeconds of the chart"
            )
        return 128 + self._stop_signal

    def _schedulers(self) -> list[supervise.Child]:
        children = self._supervisor.children
        return [child for child in children if child.role.startswith("scheduler")]

    def _fail(self, child: supervise.Child) -> int:
        """End all children after `child` has ended, and log the reason of the first that failed."""
        reasons, children = supervise.read_reasons(self._reason_fd), self._supervisor.children
        if child in (schedulers := self._schedulers()):
            supervise.await_killed(schedulers, self._supervisor.wait)
        ended = [child, *(other for other in children if other.exit_code)]
        child = supervise.first_failed(ended, children, reasons)
        self._supervisor.join([child], _TERM_GRACE_S)  # returns soon: it ends after its report
        if child is not self._api and self._api.exit_code is None:
            self._supervisor.send_signal(self._api, signal.SIGUSR1)
            self._supervisor.join([self._api], _API_FAILURE_EXIT_S)
        self._supervisor.stop(_TERM_GRACE_S)
        logger.error("error: %s", child.explain(reasons))
        return supervise.CONFIG_EXIT if child.exit_code == supervise.CONFIG_EXIT else _FAILED_EXIT


def _running_server(host: str, port: int) -> str | None:
    """The URL of the minisgl server at this address; None without one. Asks for /readyz."""
    import httpx  # slow to import, and needed with --shell only

    url = _url((host, port))
    try:
        answer = httpx.get(url + "/readyz", timeout=_PROBE_TIMEOUT_S, trust_env=False)
        return url if "status" in answer.json() else None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, TypeError):
        return None  # no server, or a server of another kind


def _bind(host: str, port: int) -> socket.socket:
    """Bind before the model loads, so that a taken port is an error at once. Raises ConfigError."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = infos[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # [::] takes IPv4 too
        return socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=both)
    except (OSError, UnicodeError) as error:  # UnicodeError: the text is not a host name
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error}; choose another --host or --port"
        ) from None


def _url(address: tuple[Any, ...], scheme: str = "http") -> str:
    """Return the URL of a socket's address. Linux connects 0.0.0.0 and [::] to this host."""
    host, port = address[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
