"""Mistral and Ministral 3."""

from minisgl.models.compose import transformer, windows_everywhere
from minisgl.models.hf_config import HfConfig, Raw
from minisgl.models.spec import ModelSpec

# In a config.json of Mistral, null means no window.
DEFAULTS: Raw = {"sliding_window": 4096}


def spec(config: HfConfig, raw: Raw) -> ModelSpec:
    return transformer(config, windows_everywhere(config))
