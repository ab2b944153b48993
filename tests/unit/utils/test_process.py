"""Ages of processes, and the folder of their sockets."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from minisgl.utils import process_age_s, socket_folder
from minisgl.utils.process import usable_cores
from tests.patience import patience


def test_age_of_a_child_is_at_most_that_of_its_parent() -> None:
    code = "import os; from minisgl.utils import process_age_s as age; print(age(os.getpid()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 <= float(done.stdout) < process_age_s(os.getpid()) + 1


def test_sockets_avoid_a_long_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 100)))
    with socket_folder() as folder:
        made = Path(folder)
        assert made.parent == Path("/tmp")
        assert made.stat().st_mode & 0o777 == 0o700
    assert not made.exists()


def test_the_folder_of_a_killed_process_is_removed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    other = tmp_path / "minisgl-other"  # no socket folder: it has no key
    other.mkdir(0o700)
    code = (
        "import os, signal\n"
        "from minisgl.utils import socket_folder\n"
        "with socket_folder() as folder:\n"
        "    print(folder, flush=True)\n"
        "    input()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    left = Path(process.stdout.readline().strip())
    with socket_folder() as mine:
        assert left.is_dir(), "its process runs"
    process.communicate("\n", timeout=patience())
    assert left.is_dir(), "its process was killed"
    with socket_folder() as mine:
        assert sorted(tmp_path.iterdir()) == sorted([Path(mine), other])


@pytest.mark.parametrize("cores", [{3}, {0, 5}])
def test_usable_cores_are_those_of_the_affinity_mask(
    cores: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    assert usable_cores() == len(cores)
