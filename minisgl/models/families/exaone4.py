"""EXAONE 4: norms after the blocks; beside windows, full layers rotate nothing."""

from minisgl.layers.attention import QkNorm
from minisgl.models.compose import transformer, windows_if_enabled
from minisgl.models.hf_config import HfConfig, Raw
from minisgl.models.rope import rope_of
from minisgl.models.spec import ModelSpec, NormsSpec


def spec(config: HfConfig, raw: Raw) -> ModelSpec:
    windows, rope = windows_if_enabled(config), rope_of(config)
    ropes = rope.of(windows)
    if config.sliding_window is not None:
        ropes = [rope.none if size is None else rope.window for size in windows]
    norms = NormsSpec(before=False, after=True)
    return transformer(config, windows, ropes=ropes, norms=norms, qk_norm=QkNorm.PER_HEAD)
