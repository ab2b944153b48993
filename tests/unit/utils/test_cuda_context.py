"""The early CUDA context, with a library that replaces the driver."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl.utils.cuda_context import open_context_early
from minisgl.utils.toolchain import find_c_compiler
from tests.patience import patience

# This driver prints each call. It has two devices, with the handles 100 and 101.
DRIVER = r"""
#include <stdio.h>
#include <stdlib.h>
int cuInit(unsigned flags) {
    printf("cuInit %u %s\n", flags, getenv("CUDA_MODULE_LOADING"));
    fflush(stdout);
    return atoi(getenv("FAKE_INIT"));
}
int cuDeviceGet(int *device, int index) {
    printf("cuDeviceGet %d\n", index);
    fflush(stdout);
    *device = 100 + index;
    return index < 2 ? 0 : 101;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    printf("cuDevicePrimaryCtxRetain %d\n", device);
    fflush(stdout);
    *context = 0;
    return 0;
}
"""
OPEN = """
import sys
from minisgl.utils import cuda_context

thread = cuda_context.open_context_early(sys.argv[1], int(sys.argv[2]))
if thread is None:
    print("no thread")
else:
    thread.join()
assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a driver, and with a package that looks like a CUDA build of torch."""
    compiler = find_c_compiler()
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    command = [compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "driver.c"]
    subprocess.run(command, check=True)
    libraries = folder / "torch" / "lib"
    libraries.mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("raise AssertionError('torch was imported')")
    (libraries / "libtorch_cuda.so").touch()
    return folder


def calls(folder: Path, device: str, index: int, **environ: str) -> list[str]:
    """Return the lines that the driver prints in a new process."""
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", OPEN, device, str(index)],
        capture_output=True,
        text=True,
        timeout=patience(),
        env=os.environ
        | {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": paths, "FAKE_INIT": "0"}
        | environ,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_the_context_of_the_rank_is_opened(device: str, folder: Path) -> None:
    expected = ["cuInit 0 LAZY", "cuDeviceGet 1", "cuDevicePrimaryCtxRetain 101"]
    assert calls(folder, device, 1) == expected


def test_a_failure_ends_the_thread_without_an_error(folder: Path) -> None:
    """torch meets the same failure later, and the engine reports it."""
    assert calls(folder, "auto", 0, FAKE_INIT="100") == ["cuInit 0 LAZY"]
    assert calls(folder, "auto", 2) == ["cuInit 0 LAZY", "cuDeviceGet 2"]


def test_the_setting_of_the_user_wins(folder: Path) -> None:
    assert calls(folder, "auto", 0, CUDA_MODULE_LOADING="EAGER")[0] == "cuInit 0 EAGER"


def test_no_thread_without_a_driver(folder: Path) -> None:
    assert calls(folder, "auto", 0, LD_LIBRARY_PATH="/nowhere") == ["no thread"]


def test_no_context_without_a_gpu(folder: Path, tmp_path: Path) -> None:
    """A context takes memory of the GPU, which a server on the CPU must not take."""
    assert open_context_early("cpu", 0) is None
    assert calls(folder, "cpu", 0) == ["no thread"]
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").touch()
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    assert calls(folder, "auto", 0, PYTHONPATH=paths) == ["no thread"]
