"""All kernels that serving a model needs, compiled into a folder before any server starts.

An engine on the device meta takes the very steps that a server takes, with tensors that hold no
data: what is compiled follows from the code, and no list can be out of date. Needs no GPU.
"""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from minisgl.attention import attention_kernels, compile_attention
from minisgl.core import ConfigError, EngineConfig
from minisgl.distributed import MetaCommunicator, TPInfo
from minisgl.engine.engine import Engine
from minisgl.engine.memory import pool_without_memory, resolve_dtype
from minisgl.kernel import compiling, filling
from minisgl.models import load_model_config

logger = logging.getLogger(__name__)


def compile_kernels(config: EngineConfig, max_chunk_tokens: int, archs: Sequence[int]) -> None:
    """Fill config.kernel_cache with what this configuration runs on GPUs of `archs`.

    archs: 90 for compute capability 9.0; none: those of the GPUs here. Raises ConfigError.
    """
    if config.kernel_cache is None:
        raise ConfigError("minisgl compile needs --kernel-cache, the folder to fill")
    folder = Path(config.kernel_cache).absolute()
    archs = sorted(set(archs) or _local_archs())
    if not archs:
        raise ConfigError("there is no GPU here: say for which to compile, such as --arch 9.0")
    began_s = time.monotonic()
    dry = msgspec.structs.replace(
        config, device="meta", num_pages=1, dummy_weight=True, kernel_cache=None
    )
    model = load_model_config(config.model_path)
    dtype = resolve_dtype(dry, model, torch.device("meta"))
    pool, backend = pool_without_memory(config, model, dtype), config.attention_backend
    ranks = [TPInfo(rank, config.tp_size) for rank in range(config.tp_size)]
    # all of them first: what cannot be done here leaves a folder that is complete as it was
    runs = [(compiling(folder, arch), tp) for arch in archs for tp in ranks]
    with filling(folder, archs, attention_kernels(backend, pool, archs)):
        for run, tp in runs:
            with run:
                Engine(dry, MetaCommunicator(tp), max_chunk_tokens).warm_up()
        compile_attention(backend, pool, archs, folder)
    logger.info(
        "kernels compiled folder=%s archs=%s s=%.0f", folder, archs, time.monotonic() - began_s
    )


def _local_archs() -> set[int]:
    capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    return {10 * major + minor for major, minor in capabilities}
