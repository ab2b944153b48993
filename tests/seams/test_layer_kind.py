"""A kind of layer from outside the package: a spec, a mixer, an entry in MIXERS, and a family."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from minisgl.distributed.comm import SingleCommunicator
from tests.parity.models import FAMILIES
from tests.seams.checkpoints import save_with_mixer
from tests.seams.gated_layer import GATED, PROMPT, TOKENS, GateMixer, check_rank
from tests.unit.distributed.ranks import run_ranks


class Reference(nn.Module):
    """Takes the place of the attention in a model of transformers."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.out_proj = nn.Linear(inner, size, bias=False)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        gate, up = self.gate_proj(hidden_states), self.up_proj(hidden_states)
        return self.out_proj(torch.sigmoid(gate) * up), None


def reference_model() -> Any:
    torch.manual_seed(0)
    config = FAMILIES["llama"]()
    config.num_hidden_layers = 4
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for layer in GATED:
        model.model.layers[layer].self_attn = Reference(config.hidden_size, 40)
    return model.eval()


def save(model: Any, folder: Path) -> None:
    fields = {"architectures": ["GatedForCausalLM"], "gate_size": 40}
    save_with_mixer(model, folder, fields, GATED, GateMixer.name)


@torch.inference_mode()
def expected_tokens(model: Any) -> list[int]:
    ids = list(PROMPT)
    for _ in range(TOKENS):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_new_kind_of_layer_runs_between_and_after_attention(ranks: int, tmp_path: Path) -> None:
    model = reference_model()
    save(model, tmp_path)
    expected = expected_tokens(model)
    if ranks == 1:
        check_rank(SingleCommunicator(), str(tmp_path), expected)
    else:
        run_ranks(ranks, tmp_path, check_rank, str(tmp_path), expected)
