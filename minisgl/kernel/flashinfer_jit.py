"""The FlashInfer modules that attention runs, and how to compile them.

flashinfer is imported by the functions and not by this file: it is optional, and the environment
variables that it reads must be set before its import.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class AttentionKernel(NamedTuple):
    """One FlashInfer module: all batch prefill kernels of one variant, dtype and head size.

    Decode on tensor cores runs the same kernels. str() gives the name that the manifest of a kernel
    cache uses, such as "fa3 bfloat16 128".

    variant   fa2, for every GPU, or fa3, for Hopper.
    dtype     of queries, keys, values and outputs.
    head_dim  elements of one head.
    """

    variant: str
    dtype: torch.dtype
    head_dim: int

    def __str__(self) -> str:
        return f"{self.variant} {str(self.dtype).removeprefix('torch.')} {self.head_dim}"


def jit_spec(kernel: AttentionKernel) -> Any:
    """FlashInfer's JitSpec of the module: its sources, its compiler flags and its cache folder.

    The arguments are those that the wrappers use for causal attention without soft cap, sliding
    window and positional encoding, so that both mean the same module.
    """
    from flashinfer.jit import gen_batch_prefill_module

    return gen_batch_prefill_module(
        kernel.variant,
        kernel.dtype,  # queries
        kernel.dtype,  # keys and values
        kernel.dtype,  # outputs
        torch.int32,  # page indices
        kernel.head_dim,
        kernel.head_dim,
        0,  # no positional encoding
        False,  # no sliding window
        False,  # no soft cap
        False,  # scores are not reduced in float16
    )


def compile_modules(specs: Sequence[Any]) -> None:
    """Compile the modules one by one.

    specs: FlashInfer's JitSpec of each module. Raises RuntimeError when a compiler fails.
    """
    for spec in specs:
        spec.build(verbose=False)
