"""FlashInfer's rule of gated delta nets for prompts, if its kernels are compiled.

They come with the package flashinfer_jit_cache of FlashInfer 0.6. nvcc would compile 66 files at
the first call, for minutes. FlashInfer 0.7 has no such module: it compiles its kernels at their
first call in each process.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

__all__ = ["compiled_rule"]


@cache
def compiled_rule() -> Callable[..., Any] | None:
    """Return FlashInfer's chunk_gated_delta_rule; None if it is absent or would compile."""
    if find_spec("flashinfer") is None or find_spec("flashinfer.jit.gdn") is None:
        return None
    if not import_module("flashinfer.jit.gdn").gen_gdn_prefill_sm90_module().is_compiled:
        return None
    rule: Callable[..., Any] = import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule
    return rule
