"""The progress of Triton's compilations: which lines are logged, and when."""

import logging
import sys
from types import SimpleNamespace

import pytest

from minisgl.build.compile_log import CompileLog


class Clock:
    """Seconds that the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> CompileLog:
    """A log that watches a stand-in for Triton, whose cache is the folder /cache/triton."""
    knobs = SimpleNamespace(
        cache=SimpleNamespace(dir="/cache/triton"), compilation=SimpleNamespace(listener=None)
    )
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=knobs))
    caplog.set_level(logging.INFO)
    log = CompileLog(clock)
    log.watch()
    assert knobs.compilation.listener == log.count
    return log


def compiled(log: CompileLog, seconds: float, cache_hit: bool = False) -> None:
    """Report a compilation, or a kernel that Triton found in its cache, as Triton does."""
    times = SimpleNamespace(total=int(seconds * 1e6))
    log.count(src=None, metadata={}, metadata_group={}, times=times, cache_hit=cache_hit)


def test_progress_is_logged_at_first_and_then_every_ten_seconds(
    log: CompileLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(9):
        compiled(log, 4.0)
        clock.now_s += 4.0
    assert caplog.messages == [
        "compiling Triton kernels done=1 compile_s=4 cache=/cache/triton",
        "compiling Triton kernels done=4 compile_s=16 cache=/cache/triton",
        "compiling Triton kernels done=7 compile_s=28 cache=/cache/triton",
    ]
    log.finish()
    assert caplog.messages[3:] == [
        "compiled Triton kernels done=9 compile_s=36 cache=/cache/triton"
    ]
    log.finish()
    assert len(caplog.messages) == 4


def test_kernels_from_the_cache_are_not_counted(
    log: CompileLog, caplog: pytest.LogCaptureFixture
) -> None:
    compiled(log, 0.1, cache_hit=True)
    log.finish()
    assert caplog.messages == []


def test_a_kernel_that_is_compiled_after_the_start_is_logged(
    log: CompileLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    compiled(log, 1.0)
    log.finish()
    clock.now_s += 3600.0
    compiled(log, 2.0)
    assert caplog.messages[2:] == [
        "compiling Triton kernels done=2 compile_s=3 cache=/cache/triton"
    ]


def test_without_triton_there_is_nothing_to_log(caplog: pytest.LogCaptureFixture) -> None:
    """An engine on a CPU never calls watch."""
    caplog.set_level(logging.INFO)
    CompileLog().finish()
    assert caplog.messages == []
