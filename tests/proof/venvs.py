"""Third-party packages, each in a new virtual environment at pip's newest version."""

import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["make_venv", "pip"]


def make_venv(folder: Path, *requirements: str) -> Path:
    """The environment's bin directory. Skips the test when no package index can be reached."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip(folder / "bin" / "python", "install", "-q", *requirements)
    return folder / "bin"


def pip(python: Path, *arguments: str) -> None:
    """Run pip of this Python. Skips the test when no package index can be reached."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    unreachable = ("Failed to establish a new connection", "Could not find a version", "timed out")
    if done.returncode and any(words in done.stderr for words in unreachable):
        pytest.skip(f"no package index offers {arguments[-1]} here")
    assert done.returncode == 0, done.stderr[-3000:]
