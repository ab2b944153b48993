"""Builds a runnable model from a checkpoint folder."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from minisgl.attention.base import AttentionBackend
from minisgl.core import ConfigError, EngineConfig
from minisgl.distributed.comm import Communicator
from minisgl.layers.linear import LinearBuild, share_split_k_semaphores
from minisgl.models.decoder import CausalLM
from minisgl.models.hf_config import check_supported
from minisgl.models.layer import ModelParts
from minisgl.models.loader import fill_random, finish, load_weights, materialise
from minisgl.models.quantization import (
    UNQUANTIZED,
    Quantization,
    QuantizationFactory,
    StoredWeights,
)
from minisgl.models.spec import ModelSpec
from minisgl.moe.base import MoeBackend
from minisgl.moe.experts import UnquantizedExperts
from minisgl.moe.registry import resolve_moe_backend


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelExtensions:
    """Implementations from outside this package. An entry point passes them to the engine.

    attention_backends  classes that --attention-backend can select by their names.
    moe_backends        classes that --moe-backend can select by their names.
    quantizations       formats of weights, by the value of quant_method in config.json.
    online_quantizations
                        formats to which --quantization converts an unquantised checkpoint at load.
    """

    attention_backends: tuple[type[AttentionBackend], ...] = ()
    moe_backends: tuple[type[MoeBackend], ...] = ()
    quantizations: Mapping[str, QuantizationFactory] = field(default_factory=dict)
    online_quantizations: Mapping[str, Quantization] = field(default_factory=dict)


def build_model(
    config: ModelSpec,
    engine: EngineConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    comm: Communicator,
    extensions: ModelExtensions | None = None,
    show_progress: bool = False,
    fill: bool = True,
) -> CausalLM:
    """Build this rank's share of the model on the meta device, then allocate and fill it.

    engine: has the folder, the backend and the format, and whether the weights are seeded random
    values. dtype: of activations and unquantised weights. fill=False: leave the parameters as they
    are allocated, for a device without memory. Raises ConfigError.
    """
    extensions = extensions or ModelExtensions()
    backend = resolve_moe_backend(engine.moe_backend, device, extensions.moe_backends)
    # The Triton backend imports its kernels, which takes 0.1 s. Only models with experts need them.
    moe = backend(device) if config.experts else None
    model, unused = empty_model(config, dtype, comm, moe, extensions, engine.quantization)
    materialise(model, device, dtype)
    share_split_k_semaphores(model, device)
    if fill and engine.dummy_weight:
        fill_random(model, show_progress=show_progress)
    elif fill:
        load_weights(model, engine.model_path, unused=unused, show_progress=show_progress)
    finish(model)
    model.fold_multipliers()
    # Only the bfloat16 kernels of one rank fuse the norm; elsewhere folding would gain nothing.
    if comm.tp.size == 1 and dtype is torch.bfloat16:
        model.fold_norms()
    return model


def empty_model(
    config: ModelSpec,
    dtype: torch.dtype,
    comm: Communicator,
    moe: MoeBackend | None,
    extensions: ModelExtensions,
    quantization: str | None = None,
) -> tuple[CausalLM, tuple[str, ...]]:
    """Build this rank's share of the model on the meta device.

    dtype: of activations and unquantised weights. moe: may be None if the model has no experts.
    quantization: the value of --quantization. Returns the model and the tensors that it leaves
    unused, as load_weights takes them. Raises ConfigError.
    """
    methods = _quantization(config.quantization, quantization, extensions)
    stacked = any(spec.stacked for spec in config.experts)
    experts = methods.stacked_experts if stacked else methods.experts
    if config.experts and experts is None:
        raise ConfigError("the quantisation of this checkpoint does not support experts")
    linear = LinearBuild(comm.tp, dtype, methods.linear)
    with torch.device("meta"):
        parts = ModelParts(
            config, comm, linear, experts or UnquantizedExperts, moe, methods.draft_logits
        )
        model = CausalLM(parts)
    return model, (*methods.unused, *config.unread)


def stored_weights(
    config: ModelSpec, quantization: str | None, extensions: ModelExtensions
) -> StoredWeights:
    """Return the storage of the model's weights. Arguments and errors as of `empty_model`."""
    return _quantization(config.quantization, quantization, extensions).stored


def _quantization(
    settings: Mapping[str, Any] | None, online: str | None, known: ModelExtensions
) -> Quantization:
    """Choose the format of the weights. Raises ConfigError.

    settings: the checkpoint's quantization_config. online: the value of --quantization.
    """
    if online is not None:
        check_supported("quantization", online, known.online_quantizations)
        if settings is not None:
            raise ConfigError(
                f"quantization {online!r} needs an unquantised checkpoint, and this one has a "
                f"quantization_config ({_name(settings)}): leave out the setting"
            )
        return known.online_quantizations[online]
    if settings is None:
        return UNQUANTIZED
    if _name(settings) not in known.quantizations:
        supported = ", ".join(["unquantised weights", *known.quantizations])
        raise ConfigError(
            f"quantization_config ({_name(settings)}) is not supported; supported: {supported}"
        )
    return known.quantizations[_name(settings)](settings)


def _name(settings: Mapping[str, Any]) -> str:
    return str(settings.get("quant_method", "unknown"))
