"""A kind of layer from outside the package: a spec, a mixer, an entry in MIXERS, and a family."""

import json
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from minisgl.distributed.comm import Communicator, SingleCommunicator
from minisgl.layers.linear import ColumnParallelLinear, RowParallelLinear
from minisgl.layers.mixer import ForwardContext, Mixer, MixerBuild
from minisgl.layers.norm import BlockInput
from minisgl.layers.shards import split_evenly
from minisgl.models import decoder, registry
from minisgl.models.compose import attention_layers, dense_layers, model_spec
from minisgl.models.hf_config import HfConfig
from minisgl.models.rope import rope_of
from minisgl.models.spec import ModelSpec
from tests.parity.driver import Driver, make_engine
from tests.parity.models import FAMILIES
from tests.unit.distributed.ranks import run_ranks

GATED = (1, 3)  # the layers of the model with the new kind; the last layer is one of them
PROMPT = list(range(3, 30))
TOKENS = 5


class GateSpec(NamedTuple):
    """A layer that reads no other token: out(sigmoid(gate) * up). inner: features of the gate."""

    inner: int


class GateMixer(Mixer):
    name = "token_gate"

    def __init__(self, spec: GateSpec, build: MixerBuild) -> None:
        super().__init__()
        self.spec, tp = spec, build.comm.tp
        gate = split_evenly("gate_proj", spec.inner, tp.rank, tp.size)
        outputs = (gate, gate._replace(name="up_proj"))
        self.gate_up = ColumnParallelLinear(build.size, outputs, False, build.linear)
        self.out = RowParallelLinear(
            gate._replace(name="out_proj"), build.size, False, build.linear
        )

    @property
    def kind(self) -> Hashable:
        return self.spec

    def mix(self, block_input: BlockInput, context: ForwardContext) -> Tensor:
        gate, up = self.gate_up.forward(block_input).chunk(2, dim=-1)
        return torch.sigmoid(gate) * up


def gated_spec(config: HfConfig, raw: Mapping[str, Any]) -> ModelSpec:
    rope, count = rope_of(config), config.num_layers
    windows = [None] * (count - len(GATED))
    attention = iter(attention_layers(config, windows, rope.of(windows)))
    gate = GateSpec(raw["gate_size"])
    mixers = [gate if layer in GATED else next(attention) for layer in range(count)]
    return model_spec(config, rope, mixers, dense_layers(config))


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
    """Write a checkpoint whose tensors of the new layers have the name of the mixer."""
    config = model.config.to_dict() | {"architectures": ["GatedForCausalLM"], "gate_size": 40}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = model.state_dict()
    for layer in GATED:
        old, new = (f"model.layers.{layer}.{name}." for name in ("self_attn", GateMixer.name))
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")


def add_kind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decoder, "MIXERS", {**decoder.MIXERS, GateSpec: GateMixer})
    family = registry.Family(gated_spec)
    patch.setattr(registry, "FAMILIES", {**registry.FAMILIES, "GatedForCausalLM": family})


@torch.inference_mode()
def expected_tokens(model: Any) -> list[int]:
    ids = list(PROMPT)
    for _ in range(TOKENS):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def check_rank(comm: Communicator, folder: str, expected: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        add_kind(patch)
        engine = make_engine(folder, comm)
        assert engine._model_config.pools == ((0, 1),)
        for row, chunk in enumerate((1, 7, len(PROMPT))):
            assert Driver(engine).generate(row, PROMPT, TOKENS, chunk=chunk) == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_new_kind_of_layer_runs_between_and_after_attention(ranks: int, tmp_path: Path) -> None:
    model = reference_model()
    save(model, tmp_path)
    expected = expected_tokens(model)
    if ranks == 1:
        check_rank(SingleCommunicator(), str(tmp_path), expected)
    else:
        run_ranks(ranks, tmp_path, check_rank, str(tmp_path), expected)
