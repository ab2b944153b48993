"""The launcher: binds the port, starts the children, and ends all of them when one ends.

    api, tokenizer-0.., detokenizer, scheduler, scheduler-1..      (and the shell, when asked for)

It loads no torch and holds no state of requests; it may run as PID 1.
"""

import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from minisgl.core import ConfigError
from minisgl.server.auth import key_hashes
from minisgl.server.config import CHILD_COMMAND, ChildSpec, ServerConfig
from minisgl.utils import make_socket_dir, setup_logging, supervise

logger = logging.getLogger(__name__)

_FAILED_EXIT = 1
# Of the API server: drained; or ended by the signal while something was still loading, which does
# not read its Shutdown.
_STOPPED_EXITS = (0, -signal.SIGTERM, -signal.SIGUSR2)
_SCHEDULER_GRACE_S = 5.0  # to leave by its Shutdown message
_TERM_GRACE_S = 3.0
_LAST_WORDS_S = 4.0  # for the API server to send error chunks
_DRAIN_MARGIN_S = 8.0  # over --drain-timeout: 2 s for error chunks, 3 s for closing connections
_SAME_SIGNAL_S = 0.2


def launch(config: ServerConfig, scheduler_command: Sequence[str] = CHILD_COMMAND) -> int:
    """Serve until told to stop; the exit code. scheduler_command is replaced by tests only.

    Raises ConfigError when the port, or a folder for the sockets, cannot be had.
    """
    setup_logging("launcher", "info", config.log_format)
    shell_key = secrets.token_urlsafe() if config.shell and config.api_key_hashes else None
    if shell_key is not None:
        hashes = (*config.api_key_hashes, *key_hashes([shell_key], None))
        config = msgspec.structs.replace(config, api_key_hashes=hashes)
    try:
        socket_dir = make_socket_dir()
    except OSError as error:
        raise ConfigError(f"no folder for the sockets can be made: {error}") from None
    reason_read, reason_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        with _bind(config.host, config.port) as listener, supervise.Supervisor() as supervisor:
            template = ChildSpec(
                role="",
                index=0,
                parent_pid=os.getpid(),
                socket_dir=socket_dir,
                reason_fd=reason_write,
                config=config,
                url=_url(listener, "https" if config.ssl_certfile else "http"),
            )
            service = _Service(supervisor, template, reason_read, scheduler_command)
            service.start(listener, shell_key)
            return service.run()
    finally:
        os.close(reason_read)
        os.close(reason_write)
        shutil.rmtree(socket_dir, ignore_errors=True)


@dataclass(eq=False)
class _Service:
    """The children of one launch, and what to do about each event."""

    _supervisor: supervise.Supervisor
    _template: ChildSpec
    _reason_fd: int
    _scheduler_command: Sequence[str]
    _stop_asked_s: float | None = None  # CLOCK_MONOTONIC; None: nobody has asked
    _shell: supervise.Child | None = None
    _api: supervise.Child = field(init=False)

    def start(self, listener: socket.socket, shell_key: str | None) -> None:
        """Start everything; the API server first, so that livez answers while the rest loads."""
        config = self._template.config
        self._say(f"loading {config.served_names[0]} from {config.engine.model_path}")
        self._say(f"listening on {self._template.url} (not ready yet)")
        self._api = self._spawn("api", 0, listener.fileno())
        listener.close()  # or clients would still be let in when the API server has ended
        for rank in range(config.engine.tp_size):
            self._spawn("scheduler", rank)
        for index in range(config.num_tokenizers):
            self._spawn("tokenizer", index)
        self._spawn("detokenizer", 0)
        if config.shell:
            # It stays in our process group: it owns the terminal and sees its Ctrl-C.
            command = [sys.executable, "-m", "minisgl.shell", "--url", self._template.url]
            environ = os.environ | ({"MINISGL_API_KEY": shell_key} if shell_key else {})
            shell = subprocess.Popen([*command, "--model", config.served_names[0]], env=environ)
            self._shell = self._supervisor.adopt(supervise.Child("shell", shell))

    def _spawn(self, role: str, index: int, listen_fd: int | None = None) -> supervise.Child:
        spec = msgspec.structs.replace(self._template, role=role, index=index, listen_fd=listen_fd)
        command = self._scheduler_command if role == "scheduler" else CHILD_COMMAND
        return self._supervisor.adopt(spec.spawn(command))

    def run(self) -> int:
        """Handle events until everything has ended; the exit code."""
        while True:
            until_s = None  # when the API server must have ended
            if self._stop_asked_s is not None:
                allowed_s = self._template.config.drain_timeout_s + _DRAIN_MARGIN_S
                until_s = self._stop_asked_s + allowed_s
            events = self._supervisor.wait(until_s)
            if not events:
                self._say("error: the API server did not end by its drain deadline")
                self._supervisor.kill(self._supervisor.children)
                return _FAILED_EXIT
            for event in events:
                if isinstance(event, supervise.Child):
                    code = self._on_exit(event)
                else:
                    code = self._on_signal(event)
                if code is not None:
                    return code

    def _ask_to_stop(self, number: signal.Signals) -> None:
        self._stop_asked_s = time.monotonic()
        graceful = number is signal.SIGTERM
        self._supervisor.send_signal(self._api, signal.SIGTERM if graceful else signal.SIGUSR2)

    def _on_signal(self, number: signal.Signals) -> int | None:
        if self._shell is not None and number is signal.SIGINT:
            return None  # Ctrl-C belongs to the shell
        if self._stop_asked_s is None:
            self._ask_to_stop(number)
            return None
        if number is signal.SIGHUP or time.monotonic() - self._stop_asked_s < _SAME_SIGNAL_S:
            return None  # terminals, shells and `timeout` signal a process, and then its group
        self._say("stopping at once")
        self._supervisor.kill(self._supervisor.children)
        return 128 + number

    def _on_exit(self, child: supervise.Child) -> int | None:
        stopping = self._stop_asked_s is not None
        if child is self._shell:
            self._ask_to_stop(signal.SIGINT)
            return None
        if stopping and child is self._api and child.exit_code in _STOPPED_EXITS:
            running = self._supervisor.running()
            if child.exit_code == 0:
                schedulers = [c for c in running if c.role.startswith("scheduler")]
                self._supervisor.join(schedulers, _SCHEDULER_GRACE_S)
            self._supervisor.stop(running, _TERM_GRACE_S)
            return 0
        if stopping and child.exit_code == 0:
            return None  # a scheduler that has left by its Shutdown
        return self._fail(child)

    def _fail(self, child: supervise.Child) -> int:
        """One child has ended unasked: say which and why, then end the others."""
        self._say(f"error: {child.explain(supervise.read_reasons(self._reason_fd))}")
        if child is not self._api and self._api.exit_code is None:
            self._supervisor.send_signal(self._api, signal.SIGUSR1)
            self._supervisor.join([self._api], _LAST_WORDS_S)
        self._supervisor.stop(self._supervisor.running(), _TERM_GRACE_S)
        return supervise.CONFIG_EXIT if child.exit_code == supervise.CONFIG_EXIT else _FAILED_EXIT

    def _say(self, text: str) -> None:
        """To whoever started us; where logs are JSON, as one of them."""
        if self._template.config.log_format == "json":
            logger.log(logging.ERROR if text.startswith("error: ") else logging.INFO, text)
            return
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} minisgl: {text}\n")
        sys.stderr.flush()


def _bind(host: str, port: int) -> socket.socket:
    """Bind before anything loads: a taken port is an error at once, not after minutes."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = infos[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except (OSError, UnicodeError) as error:  # the latter of a name that cannot be one
        raise ConfigError(f"cannot listen on {host} port {port}: {error}") from None
    return listener


def _url(listener: socket.socket, scheme: str) -> str:
    """What it listens on; on Linux the shell reaches 0.0.0.0 and [::] too."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
