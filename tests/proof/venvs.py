"""Third-party packages, each in a new virtual environment at pip's newest version."""

import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["make_venv"]


def make_venv(folder: Path, *requirements: str) -> Path:
    """The environment's bin directory. Skips the test when no package index can be reached."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install"]
    done = subprocess.run([*pip, "-q", *requirements], capture_output=True, text=True)
    unreachable = ("Failed to establish a new connection", "Could not find a version", "timed out")
    if done.returncode and any(words in done.stderr for words in unreachable):
        pytest.skip(f"no package index offers {' '.join(requirements)} here")
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "bin"
