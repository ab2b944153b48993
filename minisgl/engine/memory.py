"""Values that an EngineConfig may leave open: device, dtype, context length and CPU threads.

This module resolves these values from the model and the machine, and reads the free device memory.
It also chooses the sizes of the CUDA graphs and of the KV pools.
"""

import contextlib
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from minisgl.attention.base import AttentionNeeds
from minisgl.core import ConfigError, EngineConfig, OutOfMemory, step_sizes
from minisgl.core.batch import WindowLayers
from minisgl.core.config import MAX_DRAFT_TOKENS, smallest_chunk
from minisgl.distributed.comm import SingleCommunicator, TPInfo
from minisgl.engine import states
from minisgl.engine.graphs import DecodeShape, graph_shapes
from minisgl.kvcache.pool import KVSpec, kv_page_bytes
from minisgl.layers.states import StateBuild
from minisgl.models.decoder import local_kv_specs
from minisgl.models.spec import ModelSpec
from minisgl.utils.process import usable_cores

logger = logging.getLogger(__name__)

_MAX_GRAPH_REQS = 256  # requests of the largest decode graph if cuda_graph_max_bs is not set
_MAX_PIECE_TOKENS = 4096  # of the largest piecewise graph
# On an H100, launching a step with prompts takes longer than computing it if its tokens times the
# weights of a layer are at most _HOST_BOUND_PRODUCT (bench/notebook/2026-11-26-starts.md), and
# if a layer has at most _HOST_BOUND_WEIGHTS. The GPU reads these in 60 us.
_HOST_BOUND_PRODUCT = 12_100_000_000
_HOST_BOUND_WEIGHTS = 100_000_000
_FP8_CAPABILITY = (8, 9)  # of the first GPUs that convert e4m3
# The driver gives memory in units of 2 MiB, and not in each capture. Of 21 captures of pieces of
# one model, the second took one unit and the later ones up to five, 2.8 on average
# (bench/notebook/2026-11-28-memory.md). So each further graph has a margin of two units.
GRAPH_MARGIN_BYTES = 2 * 2 * 2**20
_USUAL_GAPS = 0.03  # memory that torch may take beyond the weights, as a share of them
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
    if not gpus:
        raise ConfigError("there is no visible GPU; use --device cpu, or see minisgl doctor")
    if tp.size > gpus:
        raise ConfigError(f"tp_size {tp.size} exceeds the {gpus} visible GPUs; lower tp_size")
    return torch.device("cuda", tp.rank)


class Resolved(NamedTuple):
    """The values of one rank that an EngineConfig leaves open.

    model            the model for contexts of at most max_seq_len tokens.
    kv_specs         the state of a token in a layer of each KV pool. Its dtype is the model's.
    attention_needs  the requirements of the layers of each KV pool on the attention backend.
    """

    model: ModelSpec
    max_seq_len: int
    kv_specs: tuple[KVSpec, ...]
    attention_needs: tuple[AttentionNeeds, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations and unquantised weights."""
        return self.kv_specs[0].dtype

    def page_bytes(self, page_size: int) -> list[int]:
        """Return the bytes of a page of each KV pool."""
        pools = zip(self.kv_specs, self.model.pools, strict=True)
        return [kv_page_bytes(spec, len(layers), page_size) for spec, layers in pools]

    def window_pages(self, page_size: int) -> int:
        """Return the most window pages that a request reserves; 0 without window layers."""
        window, span = self.model.window, self.model.largest_span
        return 0 if window is None else WindowLayers(window, 0).reserve(page_size, span)


def resolve(
    config: EngineConfig,
    model: ModelSpec,
    tp: TPInfo,
    device: torch.device,
) -> Resolved:
    """Return the values of an engine on `device`. Raises ConfigError.

    max_seq_len: None in the config means the model's context. A longer context is refused, because
    later positions have no meaning.

    The kernels of layers with states take pages of some sizes only.
    """
    if model.states:
        states.check_page_size(config.page_size)
    context = model.max_position
    length = context if config.max_seq_len is None else config.max_seq_len
    if not 1 < length <= context:
        raise ConfigError(
            f"max_seq_len {length} is outside 2..{context}, the model's context in tokens"
        )
    model = model.for_context(length)
    dtype = _resolve_dtype(config, model, device)
    fp8 = _resolve_fp8_kv(config, dtype, device)
    specs = local_kv_specs(model, SingleCommunicator(tp), dtype, fp8)
    needs = tuple(
        AttentionNeeds(
            device,
            dtype,
            spec.head_dim,
            config.page_size,
            frozenset(model.rules[i] for i in pool),
            fp8,
        )
        for spec, pool in zip(specs, model.pools, strict=True)
    )
    return Resolved(model, length, specs, needs)


def _resolve_dtype(config: EngineConfig, model: ModelSpec, device: torch.device) -> torch.dtype:
    """Return the dtype; auto is float32 on a CPU, the checkpoint's dtype on a GPU.

    Raises ConfigError.
    """
    name = config.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else model.dtype
    if name not in _DTYPES:
        raise ConfigError(f"dtype {name!r} is not supported; supported: auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _resolve_fp8_kv(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the KV cache is in FP8; otherwise it is in the model's `dtype`.

    Raises ConfigError.
    """
    name = config.kv_cache_dtype
    if name not in ("auto", "bf16", "fp8"):
        raise ConfigError(f"kv_cache_dtype {name!r} is not supported; supported: auto, bf16, fp8")
    if name == "bf16" and dtype != torch.bfloat16:
        raise ConfigError(
            "kv_cache_dtype bf16 needs dtype bfloat16, but the model runs in "
            f"{str(dtype).removeprefix('torch.')}: set kv_cache_dtype auto or dtype bfloat16"
        )
    if name == "fp8" and device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < _FP8_CAPABILITY:
            raise ConfigError(
                f"kv_cache_dtype fp8 needs a GPU of compute capability 8.9 or later, not "
                f"{major}.{minor}: set kv_cache_dtype auto"
            )
    return name == "fp8"


def graph_sizes(
    config: EngineConfig, model: ModelSpec, max_chunk_tokens: int, drafting: bool
) -> tuple[list[DecodeShape], list[int]]:
    """Return the shapes of decode steps and the numbers of tokens to capture graphs for."""
    asked, rows = config.cuda_graph_max_bs, config.max_running_reqs
    largest = min(rows, _MAX_GRAPH_REQS if asked is None else asked)
    tokens = max(rows, MAX_DRAFT_TOKENS if drafting else 0)
    pieces = min(max_chunk_tokens + tokens, _MAX_PIECE_TOKENS)
    return graph_shapes(largest, drafting), step_sizes(pieces, _host_bound(model, config.tp_size))


def _host_bound(model: ModelSpec, tp_size: int) -> int:
    """Return the number of tokens up to which launching a step takes longer than computing it."""
    inner = max(sum(mlp.features for mlp in layer.mlps) for layer in model.layers)
    kv = model.attention[0].kv
    heads = 2 * (model.q_heads + kv.kv_heads)
    weights = model.hidden_size * (heads * kv.head_dim + 3 * inner) // tp_size
    return _HOST_BOUND_PRODUCT // weights if weights <= _HOST_BOUND_WEIGHTS else 0


def further_graphs(shapes: Sequence[DecodeShape], token_sizes: Sequence[int]) -> tuple[int, int]:
    """Return the decode graphs and the piecewise graphs beside the two largest of each kind.

    The engine does not measure these. The arguments are the results of graph_sizes. Without decode
    graphs the engine captures no graph.
    """
    return (max(len(shapes) - 2, 0), max(len(token_sizes) - 2, 0)) if shapes else (0, 0)


def further_graph_bytes(
    free: Sequence[int], shapes: Sequence[DecodeShape], token_sizes: Sequence[int]
) -> int:
    """Return the memory of the graphs that a trial of the two largest of each kind lacks, in bytes.

    free: the free memory before the captures, and after each of them: of at most 2 decode graphs,
    then of at most 2 piecewise graphs. shapes, token_sizes: as for further_graphs.

    The tensors of smaller graphs reuse the memory of larger graphs, but each further graph also
    takes memory of the driver, outside of torch's pool. The size of this memory depends mostly on
    the number of kernels in the graph. A graph of fewer tokens has no more kernels, so each further
    graph counts as the second one of its kind, plus a margin.
    """
    taken = [before - after for before, after in itertools.pairwise(free)]
    captured = min(len(shapes), 2)
    seconds = sum(taken[1:captured]), sum(taken[captured + 1 :])
    further = further_graphs(shapes, token_sizes)
    return sum(
        count * (max(second, 0) + GRAPH_MARGIN_BYTES)
        for count, second in zip(further, seconds, strict=True)
    )


def kv_bytes_left(config: EngineConfig, free_before: int, taken: int) -> int:
    """Return the bytes for KV pages on a GPU.

    The engine may use the share memory_ratio of the memory that was free before the weights were
    loaded. free_before: that memory. taken: bytes of weights, steps and graphs.
    """
    return int(config.memory_ratio * free_before) - taken


def pages_that_fit(
    config: EngineConfig, resolved: Resolved, available: int, build: StateBuild
) -> list[int]:
    """Return the pages of each KV pool in `available` bytes; no more than all requests can fill.

    A request may also fill the pages of one snapshot of its recurrent states.

    The pages of two pools hold the same number of requests of kv_request_tokens tokens. With longer
    requests the first pool is full earlier, with shorter ones the second, which has the window
    layers.
    """
    size, length, model = config.page_size, resolved.max_seq_len, resolved.model
    of_full, *of_windows = resolved.page_bytes(size)
    words = states.row_words(model.states, build)
    snapshot = states.snapshot_pages(words, resolved.kv_specs[0], len(model.pools[0]), size)
    useful = config.max_running_reqs * (-(-length // size) + snapshot)
    if not of_windows:
        return [min(available // of_full, useful)]
    full = -(-min(config.kv_request_tokens, length) // size)
    reserve = resolved.window_pages(size)
    request_bytes = full * of_full + min(reserve, full) * of_windows[0]
    pages = min(available * full // request_bytes, useful) if of_full else useful
    # A window that is nearly as long as the context reserves more pages than the context has.
    return [pages, min((available - pages * of_full) // of_windows[0], max(pages, reserve))]


def largest_chunk(model: ModelSpec, max_chunk_tokens: int, page_size: int) -> int:
    """Return the most prompt tokens of a step with at most `max_chunk_tokens`.

    An image that lies in one chunk may exceed the limit, with the tokens of the smallest chunk
    before it.
    """
    span = model.largest_span
    return max(max_chunk_tokens, span + smallest_chunk(page_size)) if span > 1 else max_chunk_tokens


def window_pages_for(
    config: EngineConfig, num_pages: int, window: int, max_chunk_tokens: int
) -> int:
    """Return the window pages beside a given number of other pages.

    They suffice for the windows of all running requests, as many cached windows, and the largest
    chunk. More than num_pages would stay unused: each window page holds the tokens of one of the
    other pages.
    """
    size = config.page_size
    reserve = WindowLayers(window, 0).reserve(size)
    needed = 2 * config.max_running_reqs * reserve - (-max_chunk_tokens // size)
    return max(min(needed, num_pages), reserve)


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU; 0 for other devices."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


def torch_bytes(device: torch.device) -> tuple[int, int]:
    """Return the bytes of a GPU that torch's tensors take, and those that torch has reserved.

    Zeros for other devices.
    """
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)


def log_gaps(model: nn.Module, device: torch.device, before: tuple[int, int]) -> None:
    """Log the memory that torch took of a GPU for a model, if it exceeds the weights by 3 %.

    before: torch_bytes before the model was built. The process may have other engines.

    torch takes blocks of memory, and returns a block only when it holds no tensor. The gaps in the
    other blocks serve steps, but no KV pages.
    """
    tensors = itertools.chain(model.parameters(), model.buffers())
    weights = sum(tensor.nbytes for tensor in tensors)
    now = torch_bytes(device)
    allocated, reserved = (after - start for after, start in zip(now, before, strict=True))
    if reserved > (1 + _USUAL_GAPS) * weights:
        logger.warning(
            "weights leave gaps in GPU memory weight_bytes=%d allocated_bytes=%d reserved_bytes=%d",
            weights,
            allocated,
            reserved,
        )


@contextlib.contextmanager
def memory_of(device: torch.device) -> Iterator[None]:
    """Convert torch's out-of-memory errors inside the block to OutOfMemory."""
    try:
        yield
    except RuntimeError as error:
        out_of_memory = isinstance(error, torch.OutOfMemoryError)  # never raised for a CPU
        if not out_of_memory and "can't allocate memory" not in str(error):
            raise
        raise OutOfMemory(f"not enough memory on {device}: {error}") from error


def cpu_threads(config: EngineConfig) -> int | None:
    """Return the number of torch's threads on each rank; None when OMP_NUM_THREADS sets it.

    The ranks share the CPU limit of the container, because Linux throttles threads beyond it. An
    operation ends with the last of its threads. A thread that shares its core with the other
    processes of the server therefore delays each step, so a server has spare_cores for them.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, (usable_cores() - config.spare_cores) // config.tp_size)
