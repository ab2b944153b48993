"""What the launcher needs before it starts anything, and what it takes for a second signal."""

import signal
import tempfile
from pathlib import Path

import pytest

from minisgl.core import ConfigError
from minisgl.server import launch
from minisgl.server.config import ChildSpec
from minisgl.utils.supervise import Child, Supervisor
from tests.unit.server.fakes import CONFIG


def test_no_room_for_sockets_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As where the root file system is read-only and no /tmp is mounted: it was a traceback."""
    monkeypatch.setattr(launch, "setup_logging", lambda *words: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="no folder for the sockets can be made"):
        launch.launch(CONFIG)


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_host_that_cannot_be_one_is_one_line(host: str) -> None:
    """Names that no resolver is asked for are a UnicodeError."""
    with pytest.raises(ConfigError, match="cannot listen on"):
        launch._bind(host, 0)


def test_terminal_that_closes_is_never_in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shell hangs up, and the kernel once more when the shell has ended, later than 0.2 s with
    an EXIT trap of 1 s: that cut all answers. So did a terminal closed after Ctrl-C."""
    monkeypatch.setattr(launch, "_SAME_SIGNAL_S", 0.0)
    spec = ChildSpec(role="", index=0, parent_pid=0, socket_dir="", reason_fd=-1, config=CONFIG)
    sent: list[int] = []
    monkeypatch.setattr(Supervisor, "send_signal", lambda self, child, number: sent.append(number))
    with Supervisor() as supervisor:
        service = launch._Service(supervisor, spec, -1, ())
        service._api = Child("api", process=None)
        heard = [signal.SIGHUP, signal.SIGHUP, signal.SIGHUP, signal.SIGTERM]
        assert [service._on_signal(number) for number in heard] == [None, None, None, 128 + 15]
        assert sent == [signal.SIGUSR2]
