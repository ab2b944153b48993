"""A linear method from outside the package: int8 weights with one scale for each output feature.

The whole model runs with it through the engine, from a checkpoint that stores int8 tensors.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from minisgl.core import ConfigError, EngineConfig
from minisgl.distributed.comm import SingleCommunicator, TPInfo
from minisgl.engine import DEFAULT_EXTENSIONS, Engine, Extensions
from minisgl.kernel.elementwise import PendingNorm
from minisgl.layers.linear import LinearMethod
from minisgl.layers.shards import LinearShards, Placement
from minisgl.models.build import build_model as build
from minisgl.models.config import load_model_spec
from minisgl.models.quantization import Quantization
from tests.parity.driver import Driver
from tests.parity.models import build_model

PROMPT = list(range(3, 40))


class Int8Linear(LinearMethod):
    """weight: int8 [rows, inputs]; weight_scale: [rows]. Dequantised at each use."""

    def __init__(self, shards: LinearShards, dtype: torch.dtype) -> None:
        super().__init__(shards, dtype)
        weight = torch.empty(shards.rows, shards.inputs.local, dtype=torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Parameter(torch.empty(shards.rows, dtype=torch.float32))

    def placements(self, name: str) -> Iterator[Placement]:
        yield from self.shards.placements(name, "weight", stored=("I8",))
        yield from self.shards.placements(name, "weight_scale", per_row=True)
        yield from super().placements(name)

    def product(self, x: Tensor, norm: PendingNorm | None = None) -> Tensor:
        weight = self.weight * self.weight_scale[:, None]
        return functional.linear(x, weight.to(x.dtype), self.bias)


INT8 = Extensions(quantizations={"int8-rows": lambda settings: Quantization(Int8Linear)})


def quantised(source: str, folder: Path) -> tuple[str, str]:
    """Save the model with int8 linears, and a float32 model of the same, rounded, weights."""
    tensors = load_file(Path(source) / "model.safetensors")
    stored, rounded = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            scale = tensor.abs().amax(dim=1) / 127
            stored[name] = (tensor / scale[:, None]).round().to(torch.int8)
            stored[f"{name}_scale"] = scale
            rounded[name] = stored[name] * scale[:, None]
    config = json.loads((Path(source) / "config.json").read_text())
    settings = {"quantization_config": {"quant_method": "int8-rows"}}
    paths = []
    for kind, content, changes in (("int8", stored, settings), ("float", rounded, {})):
        path = folder / kind
        path.mkdir()
        save_file(content, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(config | changes))
        paths.append(str(path))
    return paths[0], paths[1]


def engine(
    path: str, extensions: Extensions = DEFAULT_EXTENSIONS, dtype: str = "float32"
) -> Engine:
    config = EngineConfig(
        model_path=path, device="cpu", dtype=dtype, num_pages=64, page_size=4, max_running_reqs=4
    )
    return Engine(config, SingleCommunicator(), extensions=extensions)


def hidden_states(made: Engine) -> Tensor:
    """The hidden states from which a step of the whole prompt computes its logits."""
    seen: list[Tensor] = []
    head = made._launcher.runner.model.lm_head
    compute = head.logits
    head.logits = lambda hidden, out=None: seen.append(hidden) or compute(hidden, out)  # type: ignore
    Driver(made).generate(0, PROMPT, 1)
    return seen[0].float()


@pytest.mark.parametrize("family", ["qwen2", "llama-linear-biases"])
def test_a_model_of_int8_linears_equals_the_model_of_the_rounded_weights(
    family: str, tmp_path: Path
) -> None:
    source = build_model(family, tmp_path / "source")
    int8, rounded = quantised(source, tmp_path)
    made = engine(int8, INT8)
    methods = [
        module
        for module in made._launcher.runner.model.modules()
        if isinstance(module, LinearMethod)
    ]
    assert methods
    assert all(isinstance(method, Int8Linear) for method in methods)
    assert {method.weight.dtype for method in methods} == {torch.int8}  # type: ignore[union-attr]
    torch.testing.assert_close(hidden_states(made), hidden_states(engine(rounded)))
    expected = Driver(engine(rounded)).generate(0, PROMPT, 8)
    assert Driver(made).generate(1, PROMPT, 8) == expected


def test_the_int8_model_is_close_to_the_float_model(tmp_path: Path) -> None:
    source = build_model("qwen2", tmp_path / "source")
    int8, _ = quantised(source, tmp_path)
    found, exact = hidden_states(engine(int8, INT8)), hidden_states(engine(source))
    assert (found - exact).norm() < 0.05 * exact.norm()


def test_a_method_that_cannot_fold_norms_runs_in_bfloat16(tmp_path: Path) -> None:
    """In bfloat16 the engine folds norms where the method can. With Int8Linear the norms stay."""
    int8, rounded = quantised(build_model("qwen2", tmp_path / "source"), tmp_path)
    made = engine(int8, INT8, dtype="bfloat16")
    assert not any(
        layer.input_layernorm.folded for layer in made._launcher.runner.model.model.layers
    )
    exact = hidden_states(engine(rounded))
    assert (hidden_states(made) - exact).norm() < 0.1 * exact.norm()


def test_a_quantisation_that_is_not_registered_is_refused(tmp_path: Path) -> None:
    int8, _ = quantised(build_model("qwen2", tmp_path / "source"), tmp_path)
    with pytest.raises(ConfigError, match=r"quantization_config \(int8-rows\) is not supported"):
        engine(int8)
    other = Extensions(quantizations={"fp8": lambda settings: Quantization(Int8Linear)})
    with pytest.raises(ConfigError, match="supported: unquantised weights, fp8"):
        engine(int8, other)


class Rank(SingleCommunicator):
    """A rank that only loads weights. It exchanges nothing with other ranks."""

    def __init__(self, rank: int, size: int) -> None:
        self.tp = TPInfo(rank, size)


def test_two_ranks_hold_the_shards_of_the_whole_linears(tmp_path: Path) -> None:
    """Rows of a column-parallel linear, columns of a row-parallel one, and the bias once."""
    int8, _ = quantised(build_model("llama-linear-biases", tmp_path / "source"), tmp_path)

    def layer_of(rank: int, size: int) -> Any:
        return build(
            load_model_spec(int8),
            EngineConfig(model_path=int8),
            device=torch.device("cpu"),
            dtype=torch.float32,
            comm=Rank(rank, size),
            extensions=INT8,
        ).model.layers[0]

    whole, first, second = layer_of(0, 1), layer_of(0, 2), layer_of(1, 2)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    gates = [layer.mlp.gate_up_proj.method.gated(x) for layer in (whole, first, second)]
    torch.testing.assert_close(torch.cat(gates[1:], dim=1), gates[0])
    sums = [
        layer.mlp.down_proj.method.product(part)
        for layer, part in zip((whole, first, second), gates, strict=True)
    ]
    torch.testing.assert_close(sums[1] + sums[2], sums[0])
