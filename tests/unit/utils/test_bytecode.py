"""The folder for bytecode, in processes whose packages have bytecode or lack it."""

import compileall
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from py_compile import PycInvalidationMode

import pytest

from tests.patience import patience

PACKAGES = ("torch", "transformers", "flashinfer")
SHOW = """
import os, sys
from minisgl.utils.bytecode import keep_bytecode

keep_bytecode()
assert "torch" not in sys.modules
print(sys.pycache_prefix, os.environ.get("PYTHONPYCACHEPREFIX"), sys.dont_write_bytecode)
"""
# A child of a process that keeps bytecode prints the time at which its module was compiled.
CHILD = """
import subprocess, sys
from minisgl.utils.bytecode import keep_bytecode

keep_bytecode()
command = "import os, torch; print(os.stat(torch.__cached__).st_mtime_ns)"
subprocess.run([sys.executable, "-c", command], check=True)
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with packages that have bytecode."""
    for package in PACKAGES:
        (tmp_path / "site" / package).mkdir(parents=True)
        (tmp_path / "site" / package / "__init__.py").touch()
    assert compileall.compile_dir(tmp_path / "site", quiet=1)
    return tmp_path / "site"


def run(program: str, site: Path, **environ: str) -> str:
    """Return the output of a new process that may not write bytecode beside the sources."""
    inherited = {n: v for n, v in os.environ.items() if n != "PYTHONPYCACHEPREFIX"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=patience(),
        env=inherited
        | {
            "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "XDG_CACHE_HOME": str(site.parent / "cache"),
        }
        | environ,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def bytecode_of(site: Path, package: str) -> Path:
    return Path(importlib.util.cache_from_source(str(site / package / "__init__.py")))


def test_the_bytecode_of_the_installation_stays_in_use(site: Path) -> None:
    assert run(SHOW, site) == "None None True"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_without_bytecode_moves_all_bytecode_to_the_cache(
    site: Path, package: str
) -> None:
    bytecode_of(site, package).unlink()
    folder = site.parent / "cache" / "minisgl" / "bytecode"
    assert run(SHOW, site) == f"{folder} {folder} False"


def test_bytecode_of_another_source_does_not_count(site: Path) -> None:
    """An image whose files got a new time of change has such bytecode."""
    source = site / "torch" / "__init__.py"
    os.utime(source, (1, 1))
    assert run(SHOW, site).endswith("bytecode False")
    mode = PycInvalidationMode.UNCHECKED_HASH
    assert compileall.compile_file(source, quiet=1, force=True, invalidation_mode=mode)
    assert run(SHOW, site) == "None None True"


def test_children_write_bytecode_once(site: Path) -> None:
    bytecode_of(site, "torch").unlink()
    first = run(CHILD, site)
    assert int(first) > 0
    assert run(CHILD, site) == first
    assert not bytecode_of(site, "torch").exists()


def test_python_may_write_beside_the_sources(site: Path) -> None:
    bytecode_of(site, "torch").unlink()
    assert run(SHOW, site, PYTHONDONTWRITEBYTECODE="") == "None None False"


def test_the_setting_of_the_user_wins(site: Path, tmp_path: Path) -> None:
    bytecode_of(site, "torch").unlink()
    shown = run(SHOW, site, PYTHONPYCACHEPREFIX=str(tmp_path))
    assert shown == f"{tmp_path} {tmp_path} True"


@pytest.mark.parametrize("cache", ["relative", "/dev/null/cache"])
def test_no_folder_that_can_be_written(site: Path, cache: str) -> None:
    bytecode_of(site, "torch").unlink()
    assert run(SHOW, site, XDG_CACHE_HOME=cache) == "None None True"
