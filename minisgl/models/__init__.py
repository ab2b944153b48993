"""Models: configuration, the registry of architectures, the decoder, weight loading."""

from minisgl.models.build import ModelExtensions, build_model
from minisgl.models.config import ModelConfig, load_model_config, model_config_from
from minisgl.models.decoder import Attended, CausalLM, ForwardContext, local_kv_spec

__all__ = [
    "Attended",
    "CausalLM",
    "ForwardContext",
    "ModelConfig",
    "ModelExtensions",
    "build_model",
    "load_model_config",
    "local_kv_spec",
    "model_config_from",
]
