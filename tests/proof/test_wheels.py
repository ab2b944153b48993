"""Every package of the locks has a wheel for both architectures of the images."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.proof

ROOT = Path(__file__).resolve().parents[2]
X86_ONLY = "helm-python-sdk=="  # the tests of the chart that need it are skipped on arm64
GLIBC = range(17, 37)  # Debian 12, the base of the images, has 2.36


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("lock", ["constraints.txt", "docker/constraints-gpu.txt"])
def test_every_pin_has_a_wheel(lock: str, machine: str, tmp_path: Path) -> None:
    pins = [line for line in (ROOT / lock).read_text().splitlines() if "==" in line]
    wanted = tmp_path / "wanted.txt"
    wanted.write_text("\n".join(p for p in pins if machine == "x86_64" or X86_ONLY not in p))
    command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed"]
    command += ["--no-deps", "--only-binary=:all:", "--python-version=3.12"]
    command += [f"--platform=manylinux_2_{minor}_{machine}" for minor in GLIBC]
    command += [f"--platform=manylinux2014_{machine}", f"--target={tmp_path / 'none'}"]
    done = subprocess.run([*command, "-r", str(wanted)], capture_output=True, text=True)
    if "Failed to establish a new connection" in done.stderr or "timed out" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr[-3000:]
