"""What an EngineConfig leaves open, decided from model and machine: device, dtype, sizes."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from minisgl.core import ConfigError, EngineConfig, OutOfMemory
from minisgl.distributed import Communicator, TPInfo
from minisgl.kvcache.pool import kv_page_bytes
from minisgl.models import ModelConfig, local_kv_spec

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(config: EngineConfig, tp: TPInfo) -> torch.device:
    """auto: this rank's GPU where there is one, else the CPU. Raises ConfigError."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = config.device
    if name == "auto":
        name = "cuda" if gpus else "cpu"
    if name == "cpu":
        return torch.device(name)
    if name != "cuda":
        raise ConfigError(f"device {name!r} is not supported; supported: auto, cpu, cuda")
    if tp.size > gpus:
        raise ConfigError(f"tensor-parallel {tp.size} needs as many GPUs, {gpus} are visible")
    return torch.device("cuda", tp.rank)


def resolve_dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    """auto: float32 on CPU, the checkpoint's dtype on a GPU. Raises ConfigError."""
    name = config.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else model.dtype
    if name not in _DTYPES:
        raise ConfigError(f"dtype {name!r} is not supported; supported: auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def resolve_max_seq_len(config: EngineConfig, model: ModelConfig) -> int:
    """None: the model's context. More than that is refused: positions would be meaningless.

    So is a context in which a sliding window would have to hide something.
    """
    context = model.max_position
    length = context if config.max_seq_len is None else config.max_seq_len
    if not 1 < length <= context:
        raise ConfigError(
            f"max_seq_len {length} is outside 2..{context}, the model's context in tokens"
        )
    window = model.sliding_window
    if window is not None and length > window:
        raise ConfigError(
            f"sliding_window {window} is not supported in a context of {length} tokens: attention "
            f"would have to forget some; supported: max_seq_len up to {window}"
        )
    return length


def resolve_num_pages(
    config: EngineConfig,
    model: ModelConfig,
    comm: Communicator,
    *,
    dtype: torch.dtype,
    max_seq_len: int,
    available_bytes: int,
) -> int:
    """KV pages to allocate, the same on every rank.

    available_bytes: what this rank can give to KV. Never more pages than all rows can fill.
    Raises OutOfMemory when not even one page fits.
    """
    if config.num_pages is not None:
        return config.num_pages
    size = config.page_size
    page_bytes = kv_page_bytes(local_kv_spec(model, comm, dtype), model.num_kv_layers, size)
    useful = config.max_running_reqs * -(-max_seq_len // size)
    pages = comm.agree_min(min(available_bytes // page_bytes, useful))
    if pages < 1:
        raise OutOfMemory(
            f"one KV page of {size} tokens takes {page_bytes} bytes, {available_bytes} are left"
        )
    return pages


@contextlib.contextmanager
def memory_of(device: torch.device) -> Iterator[None]:
    """Around what a start allocates. Raises OutOfMemory where the device has not so much."""
    try:
        yield
    except RuntimeError as error:
        lacks = isinstance(error, torch.OutOfMemoryError)  # a GPU; a CPU has no class for it
        if not lacks and "can't allocate memory" not in str(error):
            raise
        raise OutOfMemory(f"not enough memory on {device}: {error}") from error


def cpu_threads(tp_size: int) -> int | None:
    """Threads for torch on this rank, or None to leave OMP_NUM_THREADS in charge.

    A container's CPU limit counts: threads beyond it only get throttled.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return None
    cores = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        cores = cores if quota == "max" else min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        pass  # not in a cgroup v2 container: the affinity mask is all there is to know
    return max(1, int(cores) // tp_size)
