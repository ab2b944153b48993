"""Values that an EngineConfig leaves open: device, dtype, context length, threads and KV memory.

They follow from the model and the machine.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from minisgl.core import ConfigError, EngineConfig, OutOfMemory
from minisgl.distributed.comm import Communicator, TPInfo
from minisgl.kvcache.pool import kv_page_bytes
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import local_kv_spec

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DRIVER_BLOCK_BYTES = 2 * 2**20  # the driver's unit: a measured difference is off by one at most


def resolve_device(config: EngineConfig, tp: TPInfo) -> torch.device:
    """Return the device; auto is this rank's GPU if there is one, else the CPU.

    Raises ConfigError.
    """
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
    """Return the dtype; auto is float32 on a CPU, the checkpoint's dtype on a GPU.

    Raises ConfigError.
    """
    name = config.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else model.dtype
    if name not in _DTYPES:
        raise ConfigError(f"dtype {name!r} is not supported; supported: auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def resolve_max_seq_len(config: EngineConfig, model: ModelConfig) -> int:
    """Return the context length in tokens; None in the config means the model's context.

    Raises ConfigError for more than the model's context, where positions have no meaning, and for a
    context longer than the model's sliding window, which attention does not apply.
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
            f"reads the whole context; supported: max_seq_len up to {window}"
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
    """Return the number of KV pages to allocate, the same on every rank.

    available_bytes: memory that this rank has for KV pages. The result is at most the number of
    pages that all rows can fill. Raises OutOfMemory when not one page fits.
    """
    if config.num_pages is not None:
        return config.num_pages
    size = config.page_size
    page_bytes = kv_page_bytes(local_kv_spec(model, comm, dtype), model.num_kv_layers, size)
    useful = config.max_running_reqs * -(-max_seq_len // size)
    pages = comm.agree_min(min(available_bytes // page_bytes, useful))
    if pages < 1:
        raise OutOfMemory(
            f"one KV page of {size} tokens takes {page_bytes} bytes, but only {available_bytes} "
            "bytes are left; raise the memory limit or lower the number of running requests"
        )
    return pages


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU; 0 for other devices."""
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


def measure_graph_bytes(
    capture: Callable[[int], None], release: Callable[[], None], kinds: int, device: torch.device
) -> int:
    """Return the memory that all graphs take, from trial captures of the largest ones.

    capture(n) captures the n largest sizes of each kind of graph, release() frees them; kinds: the
    larger number of sizes of the two kinds.

    The tensors of smaller graphs reuse the memory of larger ones. Each further graph takes memory
    of the driver, outside of torch's pool. That depends mostly on its number of kernels, which is
    the same for every size. Both trials are compared with the same beginning, since the driver may
    keep the memory of the first one.
    """
    torch.cuda.empty_cache()
    before = free_bytes(device)
    taken: list[int] = []
    for count in (1, 2):
        capture(count)
        taken.append(before - free_bytes(device))
        release()
        torch.cuda.empty_cache()
    each = max(taken[1] - taken[0], 0) + _DRIVER_BLOCK_BYTES if taken[1] else 0
    return taken[1] + each * max(kinds - 2, 0)


@contextlib.contextmanager
def memory_of(device: torch.device) -> Iterator[None]:
    """Turn torch's errors about missing memory inside the block into OutOfMemory."""
    try:
        yield
    except RuntimeError as error:
        out_of_memory = isinstance(error, torch.OutOfMemoryError)  # never raised for a CPU
        if not out_of_memory and "can't allocate memory" not in str(error):
            raise
        raise OutOfMemory(f"not enough memory on {device}: {error}") from error


def cpu_threads(tp_size: int) -> int | None:
    """Return the number of torch's threads on this rank; None when OMP_NUM_THREADS sets it.

    The CPU limit of the container counts, since the kernel throttles threads beyond it.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return None
    cores = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        cores = cores if quota == "max" else min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        pass  # not in a container with cgroup v2: only the affinity mask limits the cores
    return max(1, int(cores) // tp_size)
