"""Builds a runnable model from a checkpoint folder."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from minisgl.attention.base import AttentionBackend
from minisgl.core import ConfigError
from minisgl.distributed.comm import Communicator
from minisgl.layers.linear import (
    LinearBuild,
    LinearMethodFactory,
    QuantizationFactory,
    UnquantizedLinear,
    share_split_k_semaphores,
)
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import CausalLM, ModelParts
from minisgl.models.loader import fill_random, load_weights, materialise
from minisgl.moe.base import MoeBackend
from minisgl.moe.registry import create_moe_backend


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelExtensions:
    """Implementations from outside this package. An entry point passes them to the engine.

    attention_backends  classes that --attention-backend can select by their names.
    moe_backends        classes that --moe-backend can select by their names.
    quantizations       linear methods, by the value of quant_method in config.json.
    """

    attention_backends: tuple[type[AttentionBackend], ...] = ()
    moe_backends: tuple[type[MoeBackend], ...] = ()
    quantizations: Mapping[str, QuantizationFactory] = field(default_factory=dict)


def build_model(
    config: ModelConfig,
    folder: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    comm: Communicator,
    moe_backend: str = "auto",
    dummy_weight: bool = False,
    show_progress: bool = False,
    fill: bool = True,
    extensions: ModelExtensions | None = None,
) -> CausalLM:
    """Build this rank's share of the model on the meta device, then allocate and fill it.

    dtype: of activations and unquantised weights. dummy_weight: fill with seeded random values
    instead of the checkpoint's tensors. fill=False: leave the parameters as they are allocated, for
    a device without memory. Raises ConfigError.
    """
    added = () if extensions is None else extensions.moe_backends
    moe = create_moe_backend(moe_backend, device, added)
    model = empty_model(config, dtype, comm, moe, extensions)
    materialise(model, device, dtype)
    share_split_k_semaphores(model, device)
    if fill and dummy_weight:
        fill_random(model)
    elif fill:
        load_weights(model, folder, show_progress=show_progress)
    # Only the bfloat16 kernels of one rank fuse the norm; elsewhere folding would gain nothing.
    if comm.tp.size == 1 and dtype is torch.bfloat16:
        model.fold_norms()
    return model


def empty_model(
    config: ModelConfig,
    dtype: torch.dtype,
    comm: Communicator,
    moe: MoeBackend,
    extensions: ModelExtensions | None = None,
) -> CausalLM:
    """Build this rank's share of the model on the meta device. Raises ConfigError.

    dtype: of activations and unquantised weights.
    """
    extensions = extensions or ModelExtensions()
    method = _linear_method(config.quantization, extensions.quantizations)
    linear = LinearBuild(comm.tp, dtype, method)
    with torch.device("meta"):
        return CausalLM(ModelParts(config, comm, linear, moe))


def _linear_method(
    settings: Mapping[str, Any] | None, known: Mapping[str, QuantizationFactory]
) -> LinearMethodFactory:
    """Choose the linear method by the checkpoint's quantization_config. Raises ConfigError."""
    if settings is None:
        return UnquantizedLinear
    name = str(settings.get("quant_method", "unknown"))
    if name not in known:
        supported = ", ".join(["unquantised weights", *known])
        raise ConfigError(f"quantization_config ({name}) is not supported; supported: {supported}")
    return known[name](settings)
