"""Ages of processes, and the folder of their sockets."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from minisgl.utils import make_socket_dir, process_age_s


def test_age_of_a_child_is_at_most_that_of_its_parent() -> None:
    code = "import os; from minisgl.utils import process_age_s as age; print(age(os.getpid()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 <= float(done.stdout) < process_age_s(os.getpid()) + 1


def test_sockets_avoid_a_long_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 100)))
    made = Path(make_socket_dir())
    assert made.parent == Path("/tmp")
    assert made.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(made)
