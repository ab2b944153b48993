"""Builds FlashInfer's modules into a Python package named flashinfer_jit_cache.

FlashInfer distributes its compiled modules in a package of this name. If the package is on
sys.path, FlashInfer looks there for a module before it compiles one. minisgl/build/versions.py has
the text of the package.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from minisgl.build.flashinfer_jit import AttentionKernel, compile_modules
from minisgl.build.versions import ARCHS_FILE, JIT_CACHE_PACKAGE


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
    from flashinfer.compilation_context import CompilationContext

    specs = compile_modules(kernels)
    names = sorted(f"sm{major}{minor}" for major, minor in CompilationContext().TARGET_CUDA_ARCHS)
    package = folder / "flashinfer_jit_cache"
    for spec in specs:
        module = package / "modules" / spec.name
        module.mkdir(parents=True, exist_ok=True)
        shutil.copy(spec.jit_library_path, module)
        (module / ARCHS_FILE).write_text(" ".join(names))
    text = JIT_CACHE_PACKAGE.format(version=flashinfer.__version__, archs=ARCHS_FILE)
    (package / "__init__.py").write_text(text)
