"""Builds FlashInfer's modules into a Python package named flashinfer_jit_cache.

FlashInfer distributes its compiled modules in a package of this name. If the package is on
sys.path, FlashInfer looks there for a module before it compiles one. The package has FlashInfer's
version and names the folder of the modules.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from minisgl.build.flashinfer_jit import AttentionKernel, compile_modules

_PACKAGE = """__version__ = "{version}"


def get_jit_cache_dir() -> str:
    return __file__.removesuffix("__init__.py") + "modules"
"""


def compile_attention_kernels(
    folder: Path, kernels: Sequence[AttentionKernel], archs: Sequence[int]
) -> None:
    """Build the modules for GPUs of `archs` (90: compute capability 9.0) into `folder`.

    Needs nvcc, a C++ compiler and ninja unless `kernels` is empty; needs no GPU. A module that is
    in FlashInfer's own cache is copied from there and not compiled again. flashinfer must not have
    been imported, because it reads the architectures at import.
    """
    if not kernels:
        return
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = " ".join(f"{a // 10}.{a % 10}" for a in sorted(archs))
    import flashinfer

    specs = compile_modules(kernels)
    package = folder / "flashinfer_jit_cache"
    for spec in specs:
        (package / "modules" / spec.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(spec.jit_library_path, package / "modules" / spec.name)
    (package / "__init__.py").write_text(_PACKAGE.format(version=flashinfer.__version__))
