"""Models: configuration, the registry of architectures, the decoder, weight loading."""

from minisgl.models.build import build_model
from minisgl.models.config import ModelConfig, MoeConfig, load_model_config, model_config_from
from minisgl.models.decoder import CausalLM, ForwardContext, local_kv_heads
from minisgl.models.registry import FAMILIES

__all__ = [
    "FAMILIES",
    "CausalLM",
    "ForwardContext",
    "ModelConfig",
    "MoeConfig",
    "build_model",
    "load_model_config",
    "local_kv_heads",
    "model_config_from",
]
