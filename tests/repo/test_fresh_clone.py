"""The make commands on a new clone, which has only the tracked files."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.patience import patience

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: there is nothing to clone")
    target = tmp_path_factory.mktemp("clone") / "minisgl"
    subprocess.run(["git", "clone", "-q", ROOT, target], check=True)
    yield target
    shutil.rmtree(target)


def make(clone: Path, *words: str) -> str:
    """Run make without this process's test settings. TORCH_INDEX of `make proof` is kept."""
    ours = ("PYTEST_", "VIRTUAL_ENV", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "OMP_NUM_THREADS")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    done = subprocess.run(
        ["make", *words],
        cwd=clone,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patience(3000),
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def test_make_clean_leaves_only_tracked_files(clone):
    for source in clone.rglob("*.py"):
        (source.parent / "__pycache__").mkdir(exist_ok=True)
        (source.parent / "__pycache__" / f"{source.stem}.pyc").touch()
    make(clone, "clean")
    status = ["git", "status", "--porcelain", "--ignored"]
    done = subprocess.run(status, cwd=clone, capture_output=True, text=True, check=True)
    assert done.stdout == ""


@pytest.mark.proof
def test_make_serve_starts_on_a_fresh_clone_and_installs_once(clone):
    install = "python -m pip --disable-pip-version-check install"
    assert install in make(clone, "serve", "ARGS=--help")
    assert install not in make(clone, "serve", "ARGS=--help")


@pytest.mark.proof
def test_make_test_runs_on_a_fresh_clone(clone):
    assert " passed" in make(clone, "test", "ARGS=tests/repo")


@pytest.mark.proof
def test_installation_follows_the_lock(clone):
    make(clone, "test", "ARGS=tests/repo/test_rules.py")
    freeze = [".venv/bin/python", "-m", "pip", "freeze", "--all", "--exclude-editable"]
    done = subprocess.run(freeze, cwd=clone, capture_output=True, text=True, check=True)
    pins = (clone / "constraints.txt").read_text().splitlines()
    installed = {line.split("+")[0] for line in done.stdout.splitlines()}
    cuda = ("pip==", "nvidia-", "cuda-", "triton==")
    assert {line for line in installed - set(pins) if not line.startswith(cuda)} == set()
