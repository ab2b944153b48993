"""The kind of layer of test_layer_kind.py, in a module of its own, because each rank imports it."""

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from minisgl.distributed.comm import Communicator
from minisgl.layers.linear import ColumnParallelLinear, RowParallelLinear
from minisgl.layers.mixer import ForwardContext, Mixer, MixerBuild
from minisgl.layers.norm import BlockInput
from minisgl.layers.shards import split_evenly
from minisgl.models import layer as decoder_layer
from minisgl.models import registry
from minisgl.models.compose import attention_layers, dense_layers, model_spec
from minisgl.models.hf_config import HfConfig
from minisgl.models.rope import rope_of
from minisgl.models.spec import ModelSpec
from tests.parity.driver import Driver, make_engine

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


def add_kind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decoder_layer, "MIXERS", {**decoder_layer.MIXERS, GateSpec: GateMixer})
    family = registry.Family(gated_spec)
    patch.setattr(registry, "FAMILIES", {**registry.FAMILIES, "GatedForCausalLM": family})


def check_rank(comm: Communicator, folder: str, expected: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        add_kind(patch)
        engine = make_engine(folder, comm)
        assert engine._launcher.runner.model.config.pools == ((0, 1),)
        for row, chunk in enumerate((1, 7, len(PROMPT))):
            assert Driver(engine).generate(row, PROMPT, TOKENS, chunk=chunk) == expected
