"""Compiles the FlashInfer modules that attention needs, and logs the progress.

FlashInfer compiles a module when a wrapper first plans with it: about 17 s for fa2 and 73 s for fa3
on 16 cores, without any output. A starting engine therefore compiles its missing modules here
first. FlashInfer then finds them in its cache.

flashinfer is imported by the functions and not by this file: it is optional, and the environment
variables that it reads must be set before its import.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

logger = logging.getLogger(__name__)


class AttentionKernel(NamedTuple):
    """One FlashInfer module: all batch prefill kernels of one variant, dtype and head size.

    Decode on tensor cores runs the same kernels. str() gives the name that the manifest of a kernel
    cache uses, such as "fa3 bfloat16 128" or "fa2 bfloat16 256 window soft_cap".

    variant   fa2, for every GPU, or fa3, for Hopper.
    dtype     of queries, keys, values and outputs.
    head_dim  elements of one head.
    window    whether the kernels mask the keys before a window.
    soft_cap  whether the kernels cap the scores.
    """

    variant: str
    dtype: torch.dtype
    head_dim: int
    window: bool = False
    soft_cap: bool = False

    def __str__(self) -> str:
        words = [self.variant, str(self.dtype).removeprefix("torch."), str(self.head_dim)]
        words += [name for name in ("window", "soft_cap") if getattr(self, name)]
        return " ".join(words)


def jit_spec(kernel: AttentionKernel) -> Any:
    """FlashInfer's JitSpec of the module: its sources, its compiler flags and its cache folder.

    The arguments are those that FlashInfer's wrappers use for causal attention without positional
    encoding. The wrappers therefore find this module.
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
        kernel.window,
        kernel.soft_cap,
        False,  # scores are not reduced in float16
    )


def compile_missing(kernels: Iterable[AttentionKernel]) -> Callable[[], None]:
    """Start to compile the modules that FlashInfer does not find, all at the same time.

    FlashInfer looks in a package of compiled modules (flashinfer_jit_cache) and in its own cache
    folder. The compilers run in processes of their own, so the caller can load weights meanwhile.

    Returns a function that waits for the modules. Call it before FlashInfer plans with one of them.
    It raises RuntimeError, as FlashInfer does, when nvcc, the C++ compiler or ninja is missing or
    fails. It also waits while another process compiles the same module.
    """
    missing = [kernel for kernel in kernels if not jit_spec(kernel).is_compiled]
    if not missing:
        return lambda: None
    with_numbers = list(enumerate(missing, 1))
    for number, kernel in with_numbers:
        _announce(number, len(missing), kernel)
    threads = ThreadPoolExecutor(len(missing), "compile")
    builds = [
        threads.submit(_build, number, len(missing), kernel) for number, kernel in with_numbers
    ]
    threads.shutdown(wait=False)

    def wait() -> None:
        for build in builds:
            build.result()

    return wait


def compile_modules(kernels: Sequence[AttentionKernel]) -> list[Any]:
    """Compile the modules one by one, log a line before and after each, and return their JitSpecs.

    Raises RuntimeError when a compiler fails.
    """
    specs = []  # FlashInfer need not be installed for no kernels
    for number, kernel in enumerate(kernels, 1):
        _announce(number, len(kernels), kernel)
        specs.append(_build(number, len(kernels), kernel))
    return specs


def _announce(number: int, total: int, kernel: AttentionKernel) -> None:
    from flashinfer.jit import env

    logger.info(
        "compiling attention kernel %d of %d: FlashInfer %s cache=%s",
        number,
        total,
        kernel,
        env.FLASHINFER_JIT_DIR,
    )


def _build(number: int, total: int, kernel: AttentionKernel) -> Any:
    began_s = time.monotonic()
    spec = jit_spec(kernel)
    spec.build(verbose=False)
    seconds = time.monotonic() - began_s
    logger.info("compiled attention kernel %d of %d s=%.0f", number, total, seconds)
    return spec
