"""`minisgl compile`, and then a run of every kind of request on a machine without compilers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minisgl.benchmark.models import write_model
from tests.patience import patience

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def run(*words: object, **environ: str) -> str:
    """Return the output of python -m with these arguments and environment variables."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, words)],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=patience(540),
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and modification time of every file below the folder, by its relative path."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(p.relative_to(folder)): (p.stat().st_size, p.stat().st_mtime_ns) for p in found}


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_nothing_is_compiled_after_minisgl_compile(kv: str, tmp_path: Path) -> None:
    """The kernel cache has been moved and is read-only, and no compiler can be found."""
    model = write_model("qwen3-0.6b", tmp_path / "model")
    folder = ("--kernel-cache", tmp_path / "made")
    run("minisgl", "compile", "--model", model, *folder, "--kv-cache-dtype", kv)
    kernels, own, empty = tmp_path / "moved", tmp_path / "own", tmp_path / "empty"
    (tmp_path / "made").rename(kernels)
    own.mkdir()
    empty.mkdir()
    for path in (kernels, *kernels.rglob("*")):
        path.chmod(path.stat().st_mode & 0o555)
    before = files(kernels)
    # Compilers are searched in PATH, CC, CXX and CUDA_HOME.
    nowhere = {"PATH": str(empty), "CC": str(empty / "cc"), "CXX": str(empty / "c++")}
    folders = {
        "HOME": str(own),
        "XDG_CACHE_HOME": str(own / "cache"),
        "FLASHINFER_WORKSPACE_BASE": str(own),
        "CUDA_HOME": str(empty),
    }
    output = run(
        "tests.gpu.cold_engine",
        model,
        kernels,
        kv,
        **nowhere,
        **folders,
        TRITON_CACHE_DIR=str(own / "triton"),
        PYTHONDONTWRITEBYTECODE="1",
    )
    print(output.splitlines()[-1])
    modules = kernels / "flashinfer_jit_cache" / "modules"
    assert json.loads(output.splitlines()[-1])["flashinfer"] == sorted(os.listdir(modules))
    assert files(kernels) == before
    written = [path for path in own.rglob("*") if path.suffix in (".json", ".cubin", ".so", ".o")]
    assert written == [], "the engine compiled a kernel"
