"""Finds the faults of a configuration before an engine starts.

The check reads config.json and the headers of the weight files. It allocates nothing on the device
and launches no kernel.
"""

import torch

from minisgl.attention.registry import resolve_phases
from minisgl.core import EngineConfig
from minisgl.distributed.comm import SingleCommunicator, TPInfo
from minisgl.engine import memory
from minisgl.models.build import ModelExtensions, empty_model
from minisgl.models.config import ModelConfig, load_model_config
from minisgl.models.decoder import CausalLM
from minisgl.models.loader import load_weights
from minisgl.moe.registry import create_moe_backend, resolve_moe_backend


def check_start(config: EngineConfig, tp: TPInfo, extensions: ModelExtensions) -> None:
    """Raise ConfigError if an engine with this configuration cannot start on this machine.

    The check covers model, device, ranks, dtype, context length, backends, and the names, shapes
    and types of the stored tensors. An engine reports the same faults, but some of them only when
    it has loaded most of the weights.
    """
    device, drafting = memory.resolve_device(config, tp), config.speculative is not None
    model = load_model_config(config.model_path)
    model, _, kv_spec, needs = memory.resolve(config, model, tp, device, drafting)
    resolve_phases(config.attention_backend, needs, extensions.attention_backends)
    resolve_moe_backend(config.moe_backend, device, extensions.moe_backends)
    share, unused = share_of(model, tp, kv_spec.dtype, extensions, config.quantization)
    if not config.dummy_weight:
        load_weights(share, config.model_path, unused=unused, headers_only=True)


def share_of(
    model: ModelConfig,
    tp: TPInfo,
    dtype: torch.dtype,
    extensions: ModelExtensions,
    quantization: str | None = None,
) -> tuple[CausalLM, tuple[str, ...]]:
    """Return a rank's share of a model on the meta device, as empty_model. Raises ConfigError.

    dtype: of activations and unquantised weights. quantization: the value of --quantization.
    """
    moe = create_moe_backend("torch", torch.device("meta"))
    return empty_model(model, dtype, SingleCommunicator(tp), moe, extensions, quantization)
