"""Settings of the families of 2026 that are read or refused without a model of them."""

from typing import Any

import pytest

from minisgl.core import ConfigError
from minisgl.layers.mamba import MambaSpec
from minisgl.models.config import model_spec_from

BASE: dict[str, Any] = {
    "vocab_size": 151,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 512,
}


KINDS = ["mamba", "attention"] * 2


@pytest.mark.parametrize(
    ("architecture", "changes", "says"),
    [
        ("Glm4MoeForCausalLM", {"n_group": 8}, "n_group 8 is not supported"),
        ("MiniMaxM2ForCausalLM", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not"),
        ("MiniMaxM2ForCausalLM", {"attn_type_list": [1, 0, 1, 1]}, "attn_type_list 0 is not"),
        (
            "MuseGlimmerTextModel",
            {"layer_rope_theta": [0, 5e5, 0, 1e4]},
            "may have 0 and rope_theta",
        ),
        ("MuseGlimmerTextModel", {"layer_rope_theta": [0]}, "has 1 entries; expected 4"),
        ("MuseGlimmerTextModel", {"tie_word_embeddings": True}, "tie_word_embeddings True is not"),
        ("MiniMaxM2ForCausalLM", {"shared_intermediate_size": 9}, "shared_intermediate_size 9 is"),
        *(
            ("Gemma4ForCausalLM", {"hidden_size_per_layer_input": 0} | changes, says)
            for changes, says in (
                ({"hidden_size_per_layer_input": 9}, "vocab_size_per_layer_input 262144 is not"),
                ({"num_kv_shared_layers": 1}, "layer 3 shares keys and values"),
                ({"num_kv_shared_layers": 9}, "layer 0 shares keys and values"),
                ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is"),
                ({"per_layer_config": {"0": {"head_dim": 64}}}, "per_layer_config .* is supported"),
                ({"per_layer_config": {"3": {"sliding_window": 9}}}, "per_layer_config .* is"),
            )
        ),
        *(
            ("NemotronHForCausalLM", {"hybrid_override_pattern": "M-*E"} | changes, says)
            for changes, says in (
                ({"hybrid_override_pattern": "M-M"}, "needs a layer of type 'full_attention'"),
                ({"hybrid_override_pattern": "M*O"}, "layer type 'O' is not supported"),
                ({"hybrid_override_pattern": "M--*"}, "layer 2 .* is of type 'mlp': expected an"),
                ({"hybrid_override_pattern": "EM*"}, "layer 0 .* is of type 'moe': expected an"),
                ({"moe_latent_size": 32}, "moe_latent_size 32 is not supported"),
                ({"n_group": 2}, "n_group 2 is not supported"),
                ({"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' is not supported"),
                ({"moe_intermediate_size": 99}, "expected a multiple of moe_intermediate_size 99"),
                ({"ssm_state_size": 48}, "ssm_state_size 48 is not supported"),
                ({"n_groups": 3}, "mamba_num_heads 128 is not a multiple of n_groups 3"),
            )
        ),
        *(
            ("GraniteMoeHybridForCausalLM", {"layer_types": KINDS} | changes, says)
            for changes, says in (
                ({"layer_types": ["mamba"] * 4}, "needs a layer of type 'full_attention'"),
                ({"layer_types": ["mamba", "moe"] * 2}, "layer type 'moe' is not supported"),
                ({"mamba_d_conv": 3}, "mamba_d_conv 3 is not supported"),
                ({"mamba_conv_bias": False}, "mamba_conv_bias False is not supported"),
                ({"mamba_proj_bias": True}, "mamba_proj_bias True is not supported"),
                ({"time_step_limit": [0.0, 0.1]}, "time_step_limit .* is not supported"),
                ({"mamba_d_head": 64}, "mamba_d_head 64 of 8 mamba_n_heads does not give 128"),
                ({"mamba_n_groups": 3}, "mamba_n_heads 8 is not a multiple of mamba_n_groups 3"),
                ({"mamba_d_state": 48}, "mamba_d_state 48 is not supported"),
                ({"shared_intermediate_size": 100}, "expected a multiple of intermediate_size 96"),
            )
        ),
    ],
)
def test_a_setting_that_is_not_computed_is_named(
    architecture: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        model_spec_from({**BASE, "architectures": [architecture], "mamba_n_heads": 8, **changes})


def test_the_fields_of_published_files_of_minimax_m2() -> None:
    fields = {"num_local_experts": 256, "rotary_dim": 64, "scoring_func": "sigmoid"}
    model = model_spec_from({**BASE, "architectures": ["MiniMaxM2ForCausalLM"], **fields})
    assert (model.ropes[0].rotary_dim, model.ropes[0].theta) == (64, 5e6)
    assert {(spec.num_experts, spec.inner) for spec in model.experts} == {(256, 96)}


def test_the_draft_head_of_glm_4_5_is_a_layer_that_is_not_read() -> None:
    model = model_spec_from({**BASE, "architectures": ["Glm4MoeForCausalLM"]})
    assert model.unread == ("model.layers.4.",)
    assert [spec.shared_gate for spec in model.experts] == [False] * 3


def test_the_layers_of_granite_4_and_both_names_of_their_types() -> None:
    fields = {"mamba_n_heads": 8, "num_local_experts": 0, "time_step_limit": [0.0, float("inf")]}
    given = {**BASE, "architectures": ["GraniteMoeHybridForCausalLM"], **fields}
    model = model_spec_from({**given, "layer_types": KINDS})
    assert model.states == (MambaSpec(1, 8, 256, 16, 0), MambaSpec(1, 8, 256, 16, 1))
    assert [rope.rotary_dim for rope in model.ropes] == [0]
    other = {"layer_types": ["linear_attention", "full_attention"] * 2}
    limit = {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
    assert model_spec_from({**given, **other, **limit}) == model


def test_a_mixer_and_the_mlp_after_it_are_one_layer_of_nemotron_h() -> None:
    given = {**BASE, "architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "ME*M-"}
    model = model_spec_from(given)
    kinds = [(type(layer.mixer).__name__, type(layer.mlp).__name__) for layer in model.layers]
    assert kinds == [
        ("MambaSpec", "ExpertsSpec"),
        ("AttentionSpec", "NoneType"),
        ("MambaSpec", "DenseSpec"),
    ]
    names = {
        "model.layers.0.mlp.gate.weight": "backbone.layers.1.mixer.gate.weight",
        "model.layers.1.self_attn.q_proj": "backbone.layers.2.mixer.q_proj",
        "model.layers.2.post_attention_layernorm.weight": "backbone.layers.4.norm.weight",
        "lm_head.weight": "lm_head.weight",
    }
    assert {name: model.stored_name(name) for name in names} == names
    listed = {"layers_block_type": ["mamba", "moe", "attention", "mamba", "mlp"]}
    assert model_spec_from({**given, **listed, "hybrid_override_pattern": None}) == model


def test_gemma_4_has_a_shape_of_kv_heads_for_each_pool() -> None:
    given = {**BASE, "architectures": ["Gemma4ForCausalLM"], "hidden_size_per_layer_input": None}
    sizes = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "sliding_window": 9}
    model = model_spec_from({**given, **sizes})
    assert [(kv.kv_heads, kv.head_dim) for kv in model.kv_specs] == [(1, 512), (2, 128)]
    assert [mixer.keys_as_values for mixer in model.attention] == [False] * 3 + [True]
    assert list(model.rope_widths.values()) == [128, 512]
    # A window that holds the whole context stays, because its pool has another shape.
    short = model.for_context(8)
    assert (short.window, short.pools, short.kv_specs) == (8, ((3,), (0, 1, 2)), model.kv_specs)
    # transformers 5 writes the shape of each layer with full attention.
    of_layer = {"3": {"head_dim": 512, "num_key_value_heads": 1}}
    listed = {"attention_k_eq_v": True, "sliding_window": 9, "per_layer_config": of_layer}
    assert model_spec_from({**given, **listed}) == model


def test_late_layers_of_gemma_4_read_the_keys_of_earlier_layers() -> None:
    """The shared layers own no pages, and each reads the last earlier layer of its kind."""
    kinds = ["sliding_attention"] * 4 + ["full_attention"]
    shared = {"num_hidden_layers": 15, "layer_types": kinds * 3, "num_kv_shared_layers": 9}
    given = {**BASE, **shared, "architectures": ["Gemma4ForCausalLM"], "sliding_window": 9}
    model = model_spec_from({**given, "vocab_size": 262_144, "use_double_wide_mlp": True})
    assert model.pools == ((4,), (0, 1, 2, 3, 5))
    read = [mixer.kv_layer for mixer in model.attention]
    assert read == [*range(6), 5, 5, 5, 4, 5, 5, 5, 5, 4]
    assert [mixer.stores for mixer in model.attention] == [True] * 6 + [False] * 9
    assert [layer.mlps[0].features for layer in model.layers] == [96] * 6 + [192] * 9
    assert "model.layers.6.self_attn.k_proj." in model.unread
    assert model.stored_name("model.layers.2.layer_input.post_per_layer_input_norm.weight") == (
        "model.layers.2.post_per_layer_input_norm.weight"
    )
