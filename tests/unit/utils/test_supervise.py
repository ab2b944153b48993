"""Children end with their parent, and the parent sees the end of each child."""

import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest

from minisgl.utils import near_names
from minisgl.utils.supervise import (
    Child,
    Supervisor,
    describe_exit,
    first_failed,
    spawn_child,
)
from tests.unit.utils.supervising import supervising

IMPORTS = "import sys, os\n"


def child(code: str) -> list[str]:
    return [sys.executable, "-c", IMPORTS + code]


def next_exit(supervisor: Supervisor) -> Child:
    while True:
        for event in supervisor.wait(time.monotonic() + 30):
            assert isinstance(event, Child)
            return event


def test_child_gets_its_payload_and_its_exit_is_seen() -> None:
    payload = b"x" * 200_000  # more than a pipe holds
    with supervising() as supervisor:
        code = "sys.exit(7 if sys.stdin.buffer.readline().strip() == b'x' * 200_000 else 1)"
        made = supervisor.adopt(spawn_child("a", child(code), payload))
        assert next_exit(supervisor) is made
        assert made.exit_code == 7


def test_sighup_is_ignored_under_nohup() -> None:
    previous = signal.getsignal(signal.SIGHUP)
    try:
        for before, hears in ((signal.SIG_DFL, [signal.SIGHUP]), (signal.SIG_IGN, [])):
            signal.signal(signal.SIGHUP, before)
            with supervising() as supervisor:
                os.kill(os.getpid(), signal.SIGHUP)
                assert supervisor.wait(time.monotonic()) == hears
    finally:
        signal.signal(signal.SIGHUP, previous)


@pytest.mark.parametrize(
    ("name", "given", "found"),
    [
        ("OMP_WAIT_POLICY", None, "PASSIVE"),
        ("OMP_WAIT_POLICY", "ACTIVE", "ACTIVE"),
    ],
)
def test_child_variable_has_a_default_unless_the_user_sets_it(
    monkeypatch: pytest.MonkeyPatch, name: str, given: str | None, found: str
) -> None:
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    with supervising() as supervisor:
        code = f"sys.exit(os.environ[{name!r}] != {found!r})"
        supervisor.adopt(spawn_child("a", child(code), b""))
        assert next_exit(supervisor).exit_code == 0


def test_exit_of_an_orphan_does_not_end_a_wait() -> None:
    """Regression: as PID 1, SIGCHLD of an orphan was taken for the deadline of a drain."""
    with supervising() as supervisor:
        end_s = time.monotonic() + 0.1
        os.kill(os.getpid(), signal.SIGCHLD)
        assert supervisor.wait(end_s) == []
        assert time.monotonic() >= end_s
        os.kill(os.getpid(), signal.SIGCHLD)
        made = supervisor.adopt(spawn_child("a", child("import time; time.sleep(0.1)"), b""))
        assert supervisor.wait(None) == [made]


def test_killed_child_is_reported_by_its_signal() -> None:
    with supervising() as supervisor:
        made = supervisor.adopt(spawn_child("a", child("import time; time.sleep(600)"), b""))
        supervisor.send_signal(made, signal.SIGKILL)
        assert next_exit(supervisor).exit_code == -signal.SIGKILL
        supervisor.send_signal(
            made, signal.SIGTERM
        )  # already reaped: no other process may receive it


def test_stop_kills_a_child_that_ignores_term() -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "os.write(1, b'r'); time.sleep(600)"
    )
    read_end, write_end = os.pipe()
    stdout = os.dup(1)
    os.dup2(write_end, 1)
    try:
        with supervising() as supervisor:
            made = supervisor.adopt(spawn_child("a", child(code), b""))
            os.read(read_end, 1)
            supervisor.stop(grace_s=0.05)
            assert made.exit_code == -signal.SIGKILL
    finally:
        os.dup2(stdout, 1)
        for fd in (read_end, write_end, stdout):
            os.close(fd)


def test_signals_are_events() -> None:
    with supervising() as supervisor:
        os.kill(os.getpid(), signal.SIGTERM)
        assert supervisor.wait(time.monotonic() + 30) == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("code", "words"),
    [(3, "exited with code 3"), (-9, "was killed by SIGKILL"), (-99, "was killed by signal 99")],
)
def test_exits_are_described_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words


def test_near_names_suggest_a_known_name() -> None:
    assert near_names("temprature", ["temperature", "top_p"]) == "; did you mean 'temperature'?"
    assert near_names("zzz", ["temperature"]) == ""


@pytest.mark.parametrize(
    ("codes", "reasons", "first"),
    [
        ((1, 1), {"b": "no memory", "a": "lost its peer"}, "b"),
        ((1, -9), {"a": "lost its peer"}, "b"),
        ((1, None), {"b": "no memory", "a": "lost its peer"}, "b"),
        ((3, None), {}, "a"),
    ],
)
def test_the_child_that_failed_first_is_found_in_every_order_of_ends(
    codes: tuple[int | None, ...], reasons: dict[str, str], first: str
) -> None:
    """Regression: the launcher named the child whose end it saw first, which lost its peer."""
    children = []
    for role, code in zip("ab", codes, strict=True):
        process = SimpleNamespace(returncode=code)
        children.append(Child(role, process))  # type: ignore[arg-type]
    ended = [child for child in children if child.exit_code is not None]
    assert first_failed(ended, children, reasons).role == first
