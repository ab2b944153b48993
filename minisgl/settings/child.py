"""`ChildSpec`: the configuration of one child process, and the commands that start children."""

import subprocess
import sys
from collections.abc import Sequence
from types import MappingProxyType

import msgspec

from minisgl.core import ConfigError, EngineConfig
from minisgl.settings.config import ServerConfig
from minisgl.utils import supervise

# The launcher appends two arguments: the name of the process, and the pid of the launcher.
CHILD_COMMAND = (sys.executable, "-m", "minisgl.launch.worker_main")
_CHECK_COMMAND = (sys.executable, "-m", "minisgl.launch.model_check")
# malloc asks for pages of 2 MiB. Starts of 0.6B on two machines became 0.24 and 0.30 s shorter. In
# the API process, 1,024 TLS connections would take 240 MiB instead of 20: each has a buffer of
# 64 KiB of which it uses little.
_SCHEDULER_ENV = MappingProxyType({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})


def check_before_weights(config: EngineConfig, folder: str) -> None:
    """Raise ConfigError if an engine cannot serve the model of a folder that lacks its weights.

    The check runs in a child process: it loads torch and opens a context on each GPU.
    """
    payload = msgspec.json.encode(msgspec.structs.replace(config, model_path=folder))
    done = subprocess.run(_CHECK_COMMAND, input=payload, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        unknown = f"the check of its configuration ended with code {done.returncode}"
        raise ConfigError(done.stdout.decode().strip() or unknown)


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one child. The launcher writes it to the child's standard input.

    role        api, tokenizer, detokenizer, grammars or scheduler.
    index       number of the process within its role, from 0.
    listen_fds  the bound TCP sockets of --port and --probe-port (api only).
    reason_fd   a pipe; the child writes a fatal error there as one line.
    url         URL of the main port, for messages to the user.
    download_s  seconds in which the launcher found or downloaded the model.
    report_fd   a pipe; the first scheduler and each tokenizer report that they have found no fault
                in the configuration. -1: nothing waits for it.
    """

    role: str
    index: int
    socket_dir: str
    reason_fd: int
    config: ServerConfig
    listen_fds: tuple[int, ...] = ()
    report_fd: int = -1
    url: str = ""
    download_s: float = 0.0

    @property
    def name(self) -> str:
        """The unique name of the child, such as scheduler, scheduler-1 or tokenizer-0."""
        many = self.role == "tokenizer" or (self.role == "scheduler" and self.index > 0)
        return f"{self.role}-{self.index}" if many else self.role

    def report_checked(self) -> None:
        """In the child: tell the launcher that the configuration has no fault."""
        if self.report_fd >= 0:
            supervise.write_report(self.report_fd)

    def spawn(self, command: Sequence[str] = CHILD_COMMAND) -> supervise.Child:
        """Start the child, which reads this spec. Its name is an argument, so `ps` shows it."""
        argv, payload = [*command, self.name], msgspec.json.encode(self)
        fds = [fd for fd in (self.reason_fd, self.report_fd, *self.listen_fds) if fd >= 0]
        env = _SCHEDULER_ENV if self.role == "scheduler" else {}
        return supervise.spawn_child(self.name, argv, payload, fds, env)
