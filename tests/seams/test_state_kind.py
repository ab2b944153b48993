"""A second kind of layer with a recurrent state, from outside the package: Mamba-2's recurrence.

    S = e^g S + k v^T;  o = S^T q        for each token, with one head

The engine allocates its memory, moves its boundaries and copies its states as those of gated delta
nets. Only the spec and the mixer are new.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from minisgl.core.batch import StateCopies
from minisgl.layers.linear import ColumnParallelLinear, RowParallelLinear
from minisgl.layers.mixer import ForwardContext, Mixer, MixerBuild
from minisgl.layers.norm import BlockInput
from minisgl.layers.shards import Shard
from minisgl.layers.states import StateBuild, StatePart
from minisgl.models import layer as decoder_layer
from minisgl.models import registry
from minisgl.models.compose import attention_layers, dense_layers, model_spec
from minisgl.models.hf_config import HfConfig
from minisgl.models.rope import rope_of
from minisgl.models.spec import ModelSpec
from tests.parity.driver import Driver, Work, make_engine
from tests.parity.models import FAMILIES
from tests.seams.checkpoints import save_with_mixer

DECAYING = (0, 2)  # the layers of the model with the new kind
DIM, TOKENS, PAGE = 12, 6, 16
PROMPT = [(11 * i + 4) % 151 for i in range(43)]


class DecaySpec(NamedTuple):
    """The new kind. Implements layers.states.StateSpec."""

    layer: int
    dim: int

    def kept(self, build: StateBuild) -> tuple[StatePart, ...]:
        return (StatePart((self.dim, self.dim), torch.float32),)

    def memory(self, kept: Sequence[Tensor], build: StateBuild) -> tuple[Tensor, ...]:
        """The state, and a ring of k, v and g of the tokens after the boundary."""
        width = 2 * self.dim + 1
        return *kept, torch.full((build.rows, 2 * build.page_size, width), torch.nan)

    def step_bytes(self, page_size: int) -> int:
        return 4 * self.dim * self.dim


class DecayMixer(Mixer):
    name = "decay"

    def __init__(self, spec: DecaySpec, build: MixerBuild) -> None:
        super().__init__()
        self.spec, size = spec, 3 * spec.dim + 1
        self.inputs = ColumnParallelLinear(
            build.size, (Shard("in_proj", size, 0, size),), False, build.linear
        )
        output = Shard("out_proj", spec.dim, 0, spec.dim)
        self.out = RowParallelLinear(output, build.size, False, build.linear)

    @property
    def kind(self) -> Hashable:
        return self.spec._replace(layer=0)

    def mix(self, block_input: BlockInput, context: ForwardContext) -> Tensor:
        q, k, v, g = self.inputs.forward(block_input).split([DIM, DIM, DIM, 1], dim=1)
        entries, step = torch.cat((k, v, decay_of(g)), 1), context.state_step
        assert step is not None
        out, (state, ring) = torch.empty_like(q), context.states[self.spec.layer]
        for row, start, length, first, base, target in zip(
            *(x.tolist() for x in step[:6]), strict=True
        ):
            s = state[row].clone() if base else torch.zeros_like(state[row])
            for position in range(base, start + length):
                if position == target:
                    state[row] = s
                if position >= start:
                    ring[row, position % len(ring[row])] = entries[first + position - start]
                k, v, g = ring[row, position % len(ring[row])].split([DIM, DIM, 1])
                s = g.exp() * s + k[:, None] * v
                if position >= start:
                    out[first + position - start] = q[first + position - start] @ s
            if target == start + length:
                state[row] = s
        return out


def decay_of(g: Tensor) -> Tensor:
    return -functional.softplus(g)


class Reference(nn.Module):
    """Takes the place of the attention in a model of transformers: whole sequences."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(size, 3 * DIM + 1, bias=False)
        self.out_proj = nn.Linear(DIM, size, bias=False)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        q, k, v, g = self.in_proj(hidden_states[0]).split([DIM, DIM, DIM, 1], dim=1)
        total = decay_of(g).cumsum(0)
        weights = (q @ k.T) * (total - total.T).exp()
        return self.out_proj(weights.tril() @ v).unsqueeze(0), None


def decay_spec(config: HfConfig, raw: Mapping[str, Any]) -> ModelSpec:
    rope, count = rope_of(config), config.num_layers
    windows = [None] * (count - len(DECAYING))
    attention = iter(attention_layers(config, windows, rope.of(windows)))
    layers: Iterator[int] = iter(range(count))
    mixers = [
        DecaySpec(next(layers), DIM) if layer in DECAYING else next(attention)
        for layer in range(count)
    ]
    return model_spec(config, rope, mixers, dense_layers(config))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[int]]:
    """The folder of a model with the new kind, and the tokens that follow PROMPT."""
    torch.manual_seed(0)
    config = FAMILIES["llama"]()
    config.num_hidden_layers = 4
    reference = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for layer in DECAYING:
        reference.model.layers[layer].self_attn = Reference(config.hidden_size)
    ids = list(PROMPT)
    with torch.inference_mode():
        for _ in range(TOKENS):
            logits = reference.eval()(torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
    fields = {"architectures": ["DecayForCausalLM"]}
    save_with_mixer(reference, tmp_path, fields, DECAYING, DecayMixer.name)
    monkeypatch.setattr(decoder_layer, "MIXERS", {**decoder_layer.MIXERS, DecaySpec: DecayMixer})
    family = registry.Family(decay_spec)
    families = {**registry.FAMILIES, "DecayForCausalLM": family}
    monkeypatch.setattr(registry, "FAMILIES", families)
    return str(tmp_path), ids[len(PROMPT) :]


def test_memory_and_decoder_serve_a_second_kind_of_states(model: tuple[str, list[int]]) -> None:
    path, expected = model
    engine = make_engine(path, page_size=PAGE)
    for row, chunk in enumerate((1, 7, len(PROMPT))):
        assert Driver(engine).generate(row, PROMPT, TOKENS, chunk=chunk) == expected


def test_a_copy_of_the_states_serves_another_row(model: tuple[str, list[int]]) -> None:
    path, expected = model
    driver = Driver(make_engine(path, page_size=PAGE))
    pages, hit = driver.snapshot(), 2 * PAGE
    driver.step(Work(0, 0, PROMPT, samples=False))
    driver.share(0, 1, hit)
    row = np.array([0, 1], dtype=np.int32)
    states = StateCopies(row[:1], pages, row[1:], pages)
    first = driver.step(Work(1, hit, PROMPT[hit:]), states=states)
    second = driver.step(Work(1, len(PROMPT)))
    assert [int(first.tokens[0, 0]), int(second.tokens[0, 0])] == expected[:2]
