"""Start-up errors of the launcher, signals that count as a second one, and the end of a rank."""

import os
import signal
import subprocess
import tempfile

import pytest

from minisgl.core import ConfigError
from minisgl.launch import launcher
from minisgl.settings.child import ChildSpec
from minisgl.utils import supervise
from minisgl.utils.supervise import Child, Supervisor
from tests.unit.server.fakes import CONFIG
from tests.unit.utils.supervising import supervising


def test_unwritable_socket_folder_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a read-only root file system without a mounted /tmp led to a traceback."""
    monkeypatch.setattr(launcher, "setup_logging", lambda *words: None)
    monkeypatch.setattr(tempfile, "tempdir", "/no-such-folder")
    with pytest.raises(ConfigError, match="no folder for the sockets can be made"):
        launcher.launch(CONFIG)


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_invalid_host_name_is_one_line(host: str) -> None:
    """getaddrinfo raises a UnicodeError for these names."""
    with pytest.raises(ConfigError, match="cannot listen on"):
        launcher._bind(host, 0)


def test_repeated_sighup_does_not_end_a_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that closes sends SIGHUP from its shell, and again from the kernel at the end of
    the shell, possibly seconds later. The second one cut all answers."""
    monkeypatch.setattr(launcher, "_SAME_SIGNAL_S", 0.0)
    spec = ChildSpec(role="", index=0, socket_dir="", reason_fd=-1, config=CONFIG)
    sent: list[int] = []
    monkeypatch.setattr(Supervisor, "send_signal", lambda self, child, number: sent.append(number))
    with supervising() as supervisor:
        service = launcher._Service(supervisor, spec, -1, ())
        service._api = supervisor.adopt(Child("api", subprocess.Popen(["true"])))
        heard = [signal.SIGHUP, signal.SIGHUP, signal.SIGHUP, signal.SIGTERM]
        assert [service._on_signal(number) for number in heard] == [None, None, None, 128 + 15]
        assert sent == [signal.SIGUSR2, signal.SIGUSR2, signal.SIGKILL], "the second of SIGTERM"


@pytest.mark.parametrize(
    ("killed", "wait_s", "named"),
    [(True, 60.0, "scheduler-1 "), (False, 0.0, "scheduler: lost its peer")],
    ids=["the peer was killed", "the peer runs on"],
)
def test_a_service_names_the_killed_rank_even_if_its_peer_is_reaped_first(
    killed: bool,
    wait_s: float,
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Regression: on a slow machine the launcher named rank 0, which had lost the killed rank."""
    monkeypatch.setattr(supervise, "_KILLED_EXIT_S", wait_s)
    reasons, reason_fd = os.pipe2(os.O_NONBLOCK)
    supervise.write_reason(reason_fd, "scheduler", "lost its peer")
    spec = ChildSpec(role="", index=0, socket_dir="", reason_fd=reason_fd, config=CONFIG)
    with supervising() as supervisor:
        service = launcher._Service(supervisor, spec, reasons, ())
        first = supervisor.adopt(Child("scheduler", subprocess.Popen(["false"])))
        supervisor.join([first], None)
        other = supervisor.adopt(Child("scheduler-1", subprocess.Popen(["sleep", "600"])))
        service._api = supervisor.adopt(Child("api", subprocess.Popen(["sleep", "600"])))
        if killed:
            supervisor.send_signal(other, signal.SIGKILL)
        assert service._fail(first) == 1
    assert caplog.messages[-1].startswith(f"error: {named}")
    os.close(reasons)
    os.close(reason_fd)
