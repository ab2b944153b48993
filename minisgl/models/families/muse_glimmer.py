"""The text of Muse Glimmer: windows in three of four layers, and an output gate of attention.

Norms precede and follow the blocks, also the token embedding. The layers with full attention, which
end with the last one, rotate nothing.
"""

import msgspec

from minisgl.core import ConfigError
from minisgl.layers.attention import OutputGate, QkNorm
from minisgl.models.compose import check_per_layer, transformer, windows_from_last
from minisgl.models.hf_config import HfConfig, Raw, check_supported, read_fields
from minisgl.models.rope import rope_of
from minisgl.models.spec import ModelSpec, Multipliers, NormsSpec

DEFAULTS: Raw = {
    "hidden_activation": "silu",
    "rms_norm_eps": 1e-5,
    "sliding_window": 2048,
    "final_logit_softcapping": 20.0,
    "eos_token_id": 200_001,
}
_INTERVAL = 4


class HfMuseGlimmer(msgspec.Struct, frozen=True):
    """The fields of config.json that only this family has.

    qk_scale_factor: the factor on the queries after their norm. output_multiplier: the factor on
    the logits before the soft cap. post_norm_eps: the epsilon of the norms after the blocks.
    layer_rope_theta: the rotary base of each layer; 0: the layer rotates nothing.
    """

    qk_scale_factor: float = 3.87
    output_multiplier: float = 0.19611613513818404
    post_norm_eps: float = 1e-8
    layer_rope_theta: list[float] | None = None


def spec(config: HfConfig, raw: Raw) -> ModelSpec:
    fields = read_fields(raw, HfMuseGlimmer, "config.json")
    check_supported("attention_bias", config.attention_bias, [False])
    check_supported("tie_word_embeddings", config.tied_embeddings, [False])
    rope, windows = rope_of(config), windows_from_last(config, _INTERVAL)
    thetas = fields.layer_rope_theta
    if thetas is None:
        last = config.num_layers - 1
        thetas = [rope.rope.theta * ((last - i) % _INTERVAL > 0) for i in range(last + 1)]
    check_per_layer(config, "layer_rope_theta", thetas)
    if not {0.0, rope.rope.theta}.issuperset(thetas):
        raise ConfigError(
            f"layer_rope_theta in config.json may have 0 and rope_theta {rope.rope.theta:g} only, "
            f"not {sorted(set(thetas))}"
        )
    model = transformer(
        config,
        windows,
        rope=rope,
        ropes=[rope.rope if theta else rope.none for theta in thetas],
        norms=NormsSpec(after=True, offset=True, after_eps=fields.post_norm_eps),
        qk_norm=QkNorm.PER_HEAD_UNWEIGHTED,
        gate=OutputGate.SEPARATE,
    )
    factors = Multipliers(query=fields.qk_scale_factor, logits=1 / fields.output_multiplier)
    return msgspec.structs.replace(
        model, multipliers=factors, norm_offset=False, embedding_norm=True
    )
