"""Connections fit into the limit of open files, and failed accepts take one log line a second."""

import asyncio
import errno
import logging
import resource

import pytest

from minisgl.core import ConfigError
from minisgl.server.edge import open_files
from minisgl.server.edge.open_files import allow_open_files, log_loop_error
from minisgl.settings.config import Limits


@pytest.fixture
def set_limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The limits that the code sets, the newest last. The code sees a hard limit of 1,024."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(open_files.resource, "getrlimit", lambda kind: (1024, 1024))
    monkeypatch.setattr(open_files.resource, "setrlimit", lambda kind, both: found.append(both))
    return found


def test_connections_leave_files_for_everything_else(
    set_limits: list[tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    limits = allow_open_files(Limits(max_connections=2048), others=300)
    assert limits.max_connections + 300 + open_files._OWN_FILES == 1024
    assert set_limits == [(1024, 1024)]
    assert "--max-connections 2048 is lowered to 628" in caplog.text


def test_a_high_limit_changes_nothing(
    set_limits: list[tuple[int, int]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for hard in (20_000, resource.RLIM_INFINITY):
        monkeypatch.setattr(open_files.resource, "getrlimit", lambda kind, hard=hard: (1024, hard))
        assert allow_open_files(Limits(max_connections=2048), others=300).max_connections == 2048
        assert 2048 + 300 < set_limits[-1][0] < 20_000
    assert not caplog.records


def test_too_few_files_for_one_connection_are_refused(set_limits: list[tuple[int, int]]) -> None:
    with pytest.raises(ConfigError, match="may open 1024 files and needs 1097 or more"):
        allow_open_files(Limits(), others=1000)


def test_a_failed_accept_is_an_event_and_other_errors_are_logged_as_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        error = OSError(errno.EMFILE, "Too many open files")
        log_loop_error(
            loop, {"message": "socket.accept() out of system resource", "exception": error}
        )
        log_loop_error(loop, {"message": "a bug", "exception": ValueError()})

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert caplog.messages == ["accept failed reason=Too many open files", "a bug"]
