"""The memory and the floor of a configuration, computed from a model's config.json.

The weights are exact: they are the parameters of a rank's model on the meta device. The memory of
steps and CUDA graphs, which a starting engine measures, is predicted from sizes of tensors and from
a start on one H200. The pages follow from both by the engine's own rule (engine/memory.py).
"""

from collections.abc import Callable

import msgspec
import numpy as np
import torch

from minisgl.core import EngineConfig, OutOfMemory
from minisgl.cost.floor import (
    MEASURED_TP,
    cost_of,
    read_keys,
    step_s,
    with_weights,
)
from minisgl.cost.gpus import Gpu
from minisgl.cost.memory import remainder_bytes
from minisgl.distributed.comm import TPInfo
from minisgl.engine import memory, states
from minisgl.engine.check import weight_bytes
from minisgl.engine.images import buffer_bytes
from minisgl.layers.states import StateBuild
from minisgl.models.build import stored_weights
from minisgl.models.spec import ModelSpec
from minisgl.quantization import with_quantizations

_BATCHES = (1, 8, 32, 64, 128, 256)
_BYTE_BITS = 8
_TYPICAL_TOKENS = 1024  # prompt and answer of the requests for which the floor is computed


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Capacity and speed of a model on `tp` GPUs. Sizes are in bytes, for each GPU.

    kv_token_bytes     keys and values of one token, in layers with full attention.
    window             tokens of the largest window; None: the model has no window layers.
    window_token_bytes
                       keys and values of one token of a window, in window layers.
    window_pages       pages of window layers.
    state_bytes        recurrent states of all requests, such as those of gated delta nets.
    max_running_reqs   limit of running requests, which the engine lowers so that their recurrent
                       states fit.
    remainder_bytes    CUDA context, workspaces, the largest step and the CUDA graphs, as predicted.
    image_bytes        image encoder and image buffer, which are parts of the weights and of the
                       remainder. 0 for a model that takes no images.
    requests           number of requests that fit, by the tokens of one request.
    floor_ms           shortest time of a token, by the number of requests that decode together.
                       Each request has 1,024 tokens, or the context if it is shorter. None: this
                       number of requests does not fit. Empty: the rates of the GPU are unknown.
                       No number is larger than the limit of running requests.
    settings           flags that bound the context and the requests, so that they fit. `minisgl
                       plan` adds the flags of its command line.
    """

    gpu: str
    gpu_bytes: int
    tp: int
    dtype: str
    quantization: str
    kv_cache_dtype: str
    context: int
    weight_bytes: int
    state_bytes: int
    max_running_reqs: int
    remainder_bytes: int
    image_bytes: int
    kv_bytes: int
    kv_token_bytes: int
    window: int | None
    window_token_bytes: int
    window_pages: int
    pages: int
    tokens: int
    requests: dict[int, int]
    floor_ms: dict[int, float | None]
    settings: list[str]


def make_plan(
    config: EngineConfig,
    model: ModelSpec,
    gpu: Gpu,
    max_chunk_tokens: int = 8192,
    weights: int | None = None,
) -> Plan:
    """Return the plan of an engine on `gpu`. Raises ConfigError, as the engine does.

    max_chunk_tokens: the largest number of prompt tokens in one step, the same as for Engine.
    weights: `planned_weights` of the same engine, for plans of several GPUs.
    """
    tp, drafting = TPInfo(0, config.tp_size), config.speculative is not None
    device = torch.device("meta")
    resolved = memory.resolve(config, model, tp, device)
    model, context, specs, _ = resolved
    spec = specs[0]
    dtype, fp8_kv = spec.dtype, spec.fp8
    if weights is None:
        weights = planned_weights(config, model)
    build = states.state_build(config, dtype, tp, device, drafting)
    row_bytes = states.row_bytes(model.states, build)
    beside = memory.kv_bytes_left(config, gpu.memory_bytes, weights)
    try:
        rows = states.rows_that_fit(config.max_running_reqs, row_bytes, beside)
    except OutOfMemory:
        rows = config.max_running_reqs
    config = msgspec.structs.replace(config, max_running_reqs=rows)
    state_bytes = row_bytes * (rows + 1) if row_bytes else 0
    token_bytes, *of_windows = resolved.page_bytes(1)
    window_bytes = sum(of_windows)
    chunk = memory.largest_chunk(model, max_chunk_tokens, config.page_size)
    stored = stored_weights(model, config.quantization, with_quantizations())
    packed = weights if stored.bits < _BYTE_BITS else 0
    remainder = remainder_bytes(config, model, gpu, context, spec, chunk, packed)
    # The remainder includes the memory that is not free when the engine starts.
    taken = weights + state_bytes + remainder
    available = memory.kv_bytes_left(config, gpu.memory_bytes, taken)
    size = config.page_size
    pages, window_pages = _pages(config, resolved, available, build)
    tokens, reserve = pages * size, resolved.window_pages(size)

    def requests_of(length: int) -> int:
        """The number of requests of `length` tokens that fit."""
        if not reserve:
            return tokens // length
        return min(tokens // length, window_pages // min(reserve, -(-length // size)))

    cost = cost_of(model, tp.size, fp8_kv)
    cost = with_weights(cost, model, stored, tp.size)
    # All-reduces over a number of GPUs that was not measured count as no time.
    reduces = cost.reduces if tp.size in MEASURED_TP else 0
    typical = min(context, _TYPICAL_TOKENS)
    # The bytes of a window, spread over all keys of a context.
    read = read_keys(model, np.array([typical])) / typical
    cost = cost._replace(kv_bytes=int(cost.kv_bytes * read), reduces=reduces)
    floor_ms: dict[int, float | None] = {}
    if gpu.ceilings is not None:
        most = config.max_running_reqs
        for batch in sorted({min(batch, most) for batch in _BATCHES}):
            floor_s = step_s(cost, batch, batch * typical, gpu.ceilings, tp.size)
            floor_ms[batch] = 1e3 * floor_s if batch <= requests_of(typical) else None
    sizes = sorted({size for size in (_TYPICAL_TOKENS, 4096, 16_384) if size < context} | {context})
    return Plan(
        gpu=gpu.name,
        gpu_bytes=gpu.memory_bytes,
        tp=config.tp_size,
        dtype=str(dtype).removeprefix("torch."),
        quantization=stored.name,
        kv_cache_dtype="fp8" if fp8_kv else str(dtype).removeprefix("torch."),
        context=context,
        weight_bytes=weights,
        state_bytes=state_bytes,
        max_running_reqs=config.max_running_reqs,
        remainder_bytes=remainder,
        image_bytes=_image_bytes(config, model, dtype),
        kv_bytes=tokens * token_bytes + window_pages * size * window_bytes,
        kv_token_bytes=token_bytes,
        window=model.window,
        window_token_bytes=window_bytes,
        window_pages=window_pages,
        pages=pages,
        tokens=tokens,
        requests={each: min(requests_of(each), config.max_running_reqs) for each in sizes},
        floor_ms=floor_ms,
        settings=_settings(config, context, tokens, requests_of),
    )


def planned_weights(config: EngineConfig, model: ModelSpec) -> int:
    """Return the bytes of a rank's weights. Raises ConfigError, as the engine does."""
    tp = TPInfo(0, config.tp_size)
    dtype = memory.resolve(config, model, tp, torch.device("meta")).dtype
    return weight_bytes(model, tp, dtype, with_quantizations(), config.quantization)


def _image_bytes(config: EngineConfig, model: ModelSpec, dtype: torch.dtype) -> int:
    encoder = 0 if model.encoder is None else model.encoder.weights * dtype.itemsize
    return encoder + buffer_bytes(config, model, dtype)


def _pages(
    config: EngineConfig, resolved: memory.Resolved, available: int, build: StateBuild
) -> tuple[int, int]:
    """Return the pages of both KV pools; 0 and 0 if one request does not fit."""
    given = config.num_pages
    found = memory.pages_that_fit(config, resolved, max(available, 0), build)
    pages, windows = found[0], sum(found[1:])
    if windows < resolved.window_pages(config.page_size):
        return 0, 0
    return min(pages, given or pages), min(windows, given or windows)


def _settings(
    config: EngineConfig, context: int, tokens: int, requests_of: Callable[[int], int]
) -> list[str]:
    """The flags to set so that the requests fit. Empty: all requests fit, or no request fits."""
    flags: list[str] = []
    if not tokens:
        return flags
    longest = min(context, tokens)
    if tokens < context:
        flags.append(f"--max-seq-len-override={longest}")
    if (together := requests_of(min(longest, _TYPICAL_TOKENS))) < config.max_running_reqs:
        flags.append(f"--max-running-requests={together}")
    return flags
