"""Fills a kernel cache with all kernels that one configuration of a server runs.

Our Triton kernels: a dry run launches the same kernels as a starting server, and each launch
compiles its kernel (dry_run.py, triton_driver.py). The engine's code decides the
shapes, dtypes and alignments on which the variants of a kernel depend. A hand-written list of
variants would repeat that code.

FlashInfer's kernels: minisgl.attention.registry names the modules that its backends run, and
flashinfer.py builds them.
"""

import importlib.util
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from minisgl.attention.registry import attention_kernels
from minisgl.build.cache import TRITON_FOLDER
from minisgl.build.compile_log import CompileLog
from minisgl.compile.dry_run import attention_needs, dry_run
from minisgl.compile.flashinfer import compile_attention_kernels
from minisgl.compile.manifest import filling
from minisgl.compile.triton_driver import compiling
from minisgl.core import ConfigError, EngineConfig
from minisgl.distributed.comm import TPInfo
from minisgl.engine import DEFAULT_EXTENSIONS, Extensions
from minisgl.utils import log_event

logger = logging.getLogger(__name__)


def compile_kernels(
    config: EngineConfig,
    max_chunk_tokens: int,
    archs: Sequence[int],
    extensions: Extensions = DEFAULT_EXTENSIONS,
) -> None:
    """Fill the folder config.kernel_cache with the kernels of a server with this configuration.

    max_chunk_tokens  the largest number of prompt tokens in one step, the same as for Engine.
    archs             GPU architectures, 90 for compute capability 9.0; empty: the architectures
                      of the local GPUs.
    extensions        the extensions of the server.

    Needs a C and a C++ compiler, nvcc and ninja; needs no GPU. Reads the model's config and no
    weights. The process cannot run kernels afterwards, so call this function in a
    process of its own. Raises ConfigError when an argument is wrong, Triton is missing or the
    folder cannot be written.
    """
    if config.kernel_cache is None:
        raise ConfigError("minisgl compile needs --kernel-cache, the folder to fill")
    folder = Path(config.kernel_cache).absolute()
    archs = sorted(set(archs) or _local_archs())
    if not archs:
        raise ConfigError("this machine has no GPU: name an architecture, such as --arch 9.0")
    began_s = time.monotonic()
    needs = attention_needs(config)
    if config.kv_cache_dtype == "fp8" and archs[0] < 89:
        raise ConfigError(f"kv_cache_dtype fp8 needs --arch 8.9 or later, not {archs[0] / 10}")
    attention = attention_kernels(config.attention_backend, needs, archs)
    # This check precedes `filling`, which removes the manifest. If Triton is missing, the folder
    # keeps its manifest.
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("triton is not installed (pip install minisgl[gpu])")
    log = CompileLog()
    with filling(folder, archs, [str(kernel) for kernel in attention]):
        for arch in archs:
            for rank in range(config.tp_size):
                with compiling(folder / TRITON_FOLDER, arch):
                    log.watch()
                    dry_run(config, TPInfo(rank, config.tp_size), max_chunk_tokens, extensions)
        log.finish()
        compile_attention_kernels(folder, attention, archs)
    seconds = round(time.monotonic() - began_s)
    log_event(logger, logging.INFO, "kernels compiled", folder=folder, archs=archs, s=seconds)


def _local_archs() -> set[int]:
    capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    return {10 * major + minor for major, minor in capabilities}
