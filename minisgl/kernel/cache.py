"""A folder of kernels compiled ahead: how it is filled, and how a process comes to use it.

    triton/                our own kernels (minisgl.kernel.triton.ahead)
    flashinfer_jit_cache/  FlashInfer's (minisgl.kernel.flashinfer_ahead)

It may be read-only and may be moved. Whoever uses it still needs a folder of their own for
FlashInfer, which writes down the sources of its kernels before it looks for compiled ones
(FLASHINFER_WORKSPACE_BASE), and for kernels that are not in there (TRITON_CACHE_DIR).
"""

import importlib.util
import os
import shutil
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from minisgl.core import ConfigError


def use_kernel_cache(folder: Path) -> None:
    """Find kernels in `folder` first. Before the first launch and the import of flashinfer.

    Raises ConfigError when nothing was ever compiled into it.
    """
    if not (folder / "triton").is_dir():
        raise ConfigError(f"{folder} holds no compiled kernels: fill it with minisgl compile")
    from minisgl.kernel.triton import ahead

    ahead.read_first(folder / "triton")
    sys.path.append(str(folder))
    nvcc = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    if shutil.which("nvcc") is None and not nvcc.exists():
        # FlashInfer then says which of its modules is missing, and not that there is no nvcc
        os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")


def compiling(folder: Path, arch: int) -> AbstractContextManager[None]:
    """See minisgl.kernel.triton.ahead.compiling; kernels go where use_kernel_cache finds them.

    Raises ConfigError when Triton is not installed.
    """
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("triton is not installed (pip install minisgl[gpu])")
    from minisgl.kernel.triton import ahead

    return ahead.compiling(folder / "triton", arch)
