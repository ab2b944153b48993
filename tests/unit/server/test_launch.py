"""What the launcher needs before it starts anything."""

import tempfile
from pathlib import Path

import pytest

from minisgl.core import ConfigError
from minisgl.server import launch
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
