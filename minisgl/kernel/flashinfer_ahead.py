"""FlashInfer's kernels compiled ahead, in the form in which FlashInfer itself distributes some.

That is a package flashinfer_jit_cache, which names its version and the folder of the modules:
FlashInfer takes a module from there before it thinks of a compiler.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

_PACKAGE = """from pathlib import Path

__version__ = "{version}"


def get_jit_cache_dir() -> str:
    return str(Path(__file__).parent / "modules")
"""


def compile_flashinfer(
    folder: Path, dtype: torch.dtype, head_dim: int, variants: Sequence[str], archs: Sequence[int]
) -> None:
    """Build what attention of that kind needs for `archs` (90 for 9.0) into `folder`.

    variants: fa2, fa3. Needs nvcc, a C++ compiler and ninja, and no GPU; what FlashInfer's own
    cache holds already is not built again. flashinfer must not have been imported.
    """
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = " ".join(f"{a // 10}.{a % 10}" for a in sorted(archs))
    import flashinfer
    from flashinfer.jit import gen_batch_prefill_module

    types = (dtype, dtype, dtype, torch.int32)
    specs = [
        gen_batch_prefill_module(variant, *types, head_dim, head_dim, 0, False, False, False)
        for variant in variants
    ]
    package = folder / "flashinfer_jit_cache"
    for spec in specs:
        spec.build(verbose=False)
        (package / "modules" / spec.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(spec.jit_library_path, package / "modules" / spec.name)
    (package / "__init__.py").write_text(_PACKAGE.format(version=flashinfer.__version__))
