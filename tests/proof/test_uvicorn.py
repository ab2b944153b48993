"""Guarded connections with the newest uvicorn that pyproject.toml allows."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.proof.venvs import pip

pytestmark = pytest.mark.proof

ROOT = Path(__file__).parents[2]
TESTS = ("test_connection.py", "test_framer.py", "test_many_connections.py", "test_probes.py")


def test_connections_keep_their_promises_with_the_newest_uvicorn(tmp_path: Path) -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (uvicorn,) = [one for one in wanted if one.startswith("uvicorn")]
    pip(Path(sys.executable), "install", "-q", "--no-deps", "--target", str(tmp_path), uvicorn)
    paths = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    files = [str(ROOT / "tests/unit/server" / name) for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *files]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:]
