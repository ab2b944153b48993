"""A test that hangs ends with a failure; a slow test does not. Each test's CPU time is recorded."""

import contextlib
import json
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests import hang_guard
from tests import patience as patience_module
from tests.forks import run_forked
from tests.patience import patience

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests import hang_guard

def pytest_configure(config):
    limits = hang_guard.HangLimits(idle_s=2.0, cpu_s=0.05, total_s={total_s})
    hang_guard._ANSWER_S = 5.0
    config.pluginmanager.register(hang_guard.HangGuard(lambda item: limits))
"""
BURN = "import time; end = time.process_time() + {cpu_s}\nwhile time.process_time() < end: pass"


def run_pytest(
    folder: Path, test: str, *options: str, total_s: float = 3600
) -> "subprocess.CompletedProcess[str]":
    """Run a file with this text under a guard that calls 2 s without CPU time a hang."""
    (folder / "conftest.py").write_text(CONFTEST.format(total_s=total_s))
    (folder / "test_it.py").write_text(test)
    (folder / "pytest.ini").write_text("[pytest]\n")
    words = ["pytest", "-p", "no:cacheprovider", *options, str(folder)]
    with contextlib.chdir(folder):
        return run_forked(words, patience(), {"PYTHONPATH": str(ROOT)})


def test_a_test_without_cpu_time_fails_with_its_stacks_and_the_next_test_runs(
    tmp_path: Path,
) -> None:
    waits = "import threading\ndef test_a(): threading.Event().wait()\ndef test_b(): pass\n"
    done = run_pytest(tmp_path, waits)
    assert "1 failed, 1 passed" in done.stdout
    assert "test_a used less than 0.05 s of CPU time in 2 s" in done.stdout
    assert "threading.Event().wait()" in done.stdout


def test_a_test_whose_child_uses_cpu_time_does_not_hang(tmp_path: Path) -> None:
    child = BURN.format(cpu_s=3)
    text = "import subprocess, sys\n"
    text += f"def test_a(): subprocess.run([sys.executable, '-c', {child!r}], check=True)\n"
    done = run_pytest(tmp_path, text)
    assert "1 passed" in done.stdout, done.stdout


def test_a_busy_test_ends_at_the_limit_of_its_whole_time(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "def test_a():\n    while True: pass\n", total_s=2)
    assert "test_a took more than 2 s" in done.stdout


def test_a_test_that_waits_in_native_code_ends_the_process_with_the_stacks(tmp_path: Path) -> None:
    text = (
        "import signal, threading\n"
        "def test_a():\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMAX})\n"
        "    threading.Event().wait()\n"
    )
    done = run_pytest(tmp_path, text)
    assert done.returncode == 1
    assert "test_a used less than" in done.stderr
    assert 'test_it.py", line 4 in test_a' in done.stderr


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["one process", "workers"])
def test_the_cpu_time_of_each_test_and_its_children_is_in_a_file(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    text = f"import subprocess, sys\nBURN = {BURN.format(cpu_s=0.4)!r}\n"
    text += "def test_own():\n    exec(BURN)\n"
    text += "def test_child():\n    subprocess.run([sys.executable, '-c', BURN])\n"
    text += "def test_idle(): pass\n"
    run_pytest(tmp_path, text, *options)
    found = json.loads((tmp_path / "build" / "test-times.json").read_text())
    assert list(found)[-1] == "test_it.py::test_idle"
    assert found["test_it.py::test_idle"] < 0.3
    assert min(found["test_it.py::test_own"], found["test_it.py::test_child"]) > 0.3


def test_patience_grows_with_the_processes_that_share_a_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    waits = []
    for load in (0.5, 8.0, 100.0):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        waits.append(patience(10))
    assert waits == [10, 40, 10 * patience_module.MAX_FACTOR]


def test_a_short_test_is_measured_without_a_look_at_all_descendants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: these looks took a twentieth of the CPU time of the suite."""
    tree_cpu_s, looking = hang_guard.tree_cpu_s, set()

    def look(pid: int) -> float:
        looking.add(threading.current_thread())  # the guard of this run looks once a second
        return tree_cpu_s(pid)

    meter = hang_guard.CpuMeter()
    monkeypatch.setattr(hang_guard, "tree_cpu_s", look)
    before_s, end_s = meter.read_own(), time.process_time() + 0.05
    while time.process_time() < end_s:
        pass
    assert meter.read_own() - before_s >= 0.05
    assert threading.main_thread() not in looking
