"""Settings of the families of 2026 that are read or refused without a model of them."""

from typing import Any

import pytest

from minisgl.core import ConfigError
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
    ],
)
def test_a_setting_that_is_not_computed_is_named(
    architecture: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        model_spec_from({**BASE, "architectures": [architecture], **changes})


def test_the_fields_of_published_files_of_minimax_m2() -> None:
    fields = {"num_local_experts": 256, "rotary_dim": 64, "scoring_func": "sigmoid"}
    model = model_spec_from({**BASE, "architectures": ["MiniMaxM2ForCausalLM"], **fields})
    assert (model.ropes[0].rotary_dim, model.ropes[0].theta) == (64, 5e6)
    assert {(spec.num_experts, spec.inner) for spec in model.experts} == {(256, 96)}


def test_the_draft_head_of_glm_4_5_is_a_layer_that_is_not_read() -> None:
    model = model_spec_from({**BASE, "architectures": ["Glm4MoeForCausalLM"]})
    assert model.unread == ("model.layers.4.",)
    assert [spec.shared_gate for spec in model.experts] == [False] * 3
