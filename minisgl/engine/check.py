"""Finds the faults of a configuration before an engine starts.

The check reads config.json and the headers of the weight files. It allocates nothing on the device
and launches no kernel.
"""

from collections.abc import Sequence

import torch

from minisgl.attention.registry import resolve_phases
from minisgl.core import ConfigError, EngineConfig
from minisgl.distributed.comm import SingleCommunicator, TPInfo
from minisgl.engine import memory
from minisgl.models.build import ModelExtensions, empty_model
from minisgl.models.config import engine_model
from minisgl.models.decoder import CausalLM
from minisgl.models.loader import finish, load_weights, materialise
from minisgl.models.spec import ModelSpec
from minisgl.moe.registry import resolve_moe_backend
from minisgl.moe.torch_backend import TorchMoe
from minisgl.utils import host_memory

_GIB = 2**30


def check_start(config: EngineConfig, tp: TPInfo, extensions: ModelExtensions) -> None:
    """Raise ConfigError if an engine with this configuration cannot start on this machine.

    The check covers model, device, ranks, dtype, context length, backends, and the names, shapes
    and types of the stored tensors. An engine reports the same faults, but some of them only when
    it has loaded most of the weights.
    """
    resolved = _check_settings(config, tp, extensions)
    share, unused = share_of(resolved.model, tp, resolved.dtype, extensions, config.quantization)
    if not config.dummy_weight:
        load_weights(share, config.model_path, unused=unused, headers_only=True)


def check_before_weights(config: EngineConfig, extensions: ModelExtensions) -> None:
    """As check_start, for a folder without weights: check that they would fit into memory.

    This opens a context on each GPU of the engine, which takes memory of the GPUs until the process
    ends.
    """
    tp = TPInfo(0, config.tp_size)
    resolved, device = _check_settings(config, tp, extensions), memory.resolve_device(config, tp)
    model = resolved.model
    weights = weight_bytes(model, tp, resolved.dtype, extensions, config.quantization)
    if device.type == "cpu":
        free, place = host_memory.cpu_free_bytes() // tp.size, "of the memory of this machine"
    else:
        ranks = [torch.device(device.type, rank) for rank in range(tp.size)]
        free, place = min(memory.free_bytes(device) for device in ranks), "of each GPU"
    usable = int(config.memory_ratio * free)
    if weights > usable:
        raise ConfigError(
            f"each of {tp.size} ranks needs {weights / _GIB:.1f} GiB for weights and may use "
            f"{usable / _GIB:.1f} GiB {place}: use more GPUs (--tensor-parallel-size), "
            "--quantization fp8 or a smaller model; minisgl plan shows the memory of a model"
        )


def _check_settings(
    config: EngineConfig, tp: TPInfo, extensions: ModelExtensions
) -> memory.Resolved:
    """Check all that needs no weights except their format, and return the resolved values."""
    device = memory.resolve_device(config, tp)
    model = engine_model(config)
    resolved = memory.resolve(config, model, tp, device)
    for needs in resolved.attention_needs:
        resolve_phases(config.attention_backend, needs, extensions.attention_backends)
    resolve_moe_backend(config.moe_backend, device, extensions.moe_backends)
    return resolved


def check_memory(
    config: EngineConfig,
    resolved: memory.Resolved,
    tp: TPInfo,
    extensions: ModelExtensions,
    pages: Sequence[int],
    state_bytes: int = 0,
) -> None:
    """Raise ConfigError if a rank's random weights and KV pools do not fit into a CPU's memory.

    Linux grants more memory than there is, and later kills a process that uses it. The check covers
    random weights only, for which names like qwen3-8b make large models easy to ask for.

    pages: of each KV pool. state_bytes: of the recurrent states of all rows.
    """
    model = resolved.model
    weights = weight_bytes(model, tp, resolved.dtype, extensions, config.quantization)
    page_bytes = resolved.page_bytes(config.page_size)
    kv_bytes = state_bytes + sum(
        count * num_bytes for count, num_bytes in zip(pages, page_bytes, strict=True)
    )
    free = host_memory.cpu_free_bytes()
    if weights + kv_bytes > free:
        stored = "KV pages and states" if state_bytes else "KV pages"
        raise ConfigError(
            f"random weights of {weights / _GIB:.1f} GiB and {stored} of "
            f"{kv_bytes / _GIB:.1f} GiB do not fit into the {free / _GIB:.1f} GiB of free memory; "
            "choose a smaller model or fewer KV pages (in a benchmark: fewer or shorter requests)"
        )


def weight_bytes(
    model: ModelSpec,
    tp: TPInfo,
    dtype: torch.dtype,
    extensions: ModelExtensions,
    quantization: str | None = None,
) -> int:
    """Return the bytes of a rank's weights. The arguments are those of share_of."""
    share, _ = share_of(model, tp, dtype, extensions, quantization)
    materialise(share, torch.device("meta"), dtype)
    finish(share)
    # parameters() yields the embedding and the head once if they share one tensor.
    return sum(parameter.numel() * parameter.itemsize for parameter in share.parameters())


def share_of(
    model: ModelSpec,
    tp: TPInfo,
    dtype: torch.dtype,
    extensions: ModelExtensions,
    quantization: str | None = None,
) -> tuple[CausalLM, tuple[str, ...]]:
    """Return a rank's share of a model on the meta device, as empty_model. Raises ConfigError.

    dtype: of activations and unquantised weights. quantization: the value of --quantization.
    """
    moe = TorchMoe(torch.device("meta"))
    return empty_model(model, dtype, SingleCommunicator(tp), moe, extensions, quantization)
