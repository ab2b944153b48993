"""The layers that run before a capture launch all operations of the model.

On a CPU, the operations of torch take the place of kernels. Each operation is recorded with the
shapes, dtypes, strides and alignments of its tensors, which select and specialise a kernel.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minisgl.engine import Engine
from minisgl.engine.graphs import _NoAttention
from minisgl.engine.warmup import layers_to_rehearse
from minisgl.layers.linear import UnquantizedLinear
from tests.parity.driver import make_engine
from tests.parity.fp8_models import FORMATS, build_fp8
from tests.parity.models import build_model
from tests.unit.distributed.ranks import run_ranks

COPIES = 3  # of the layers of each tiny model
# The number of layers of the model, and the number of first layers that contain each pair of kinds
# of neighbouring layers.
MODELS = {
    "qwen3": (6, 2),
    "llama-linear-biases": (6, 2),
    "qwen3-moe": (6, 2),
    "qwen3-moe-mixed": (9, 4),  # one dense layer, between layers of experts
    "qwen2-moe-mixed": (6, 3),  # dense layers and experts in turn
    "smollm3": (12, 5),  # each fourth layer has no rotary embedding
    "olmo2": (6, 2),
    "granite": (6, 2),
    "phi3": (6, 2),
    "mistral-window": (6, 2),
    "exaone4-short-windows": (12, 5),
    "gemma3-capped": (21, 7),
    "gpt-oss-odd": (6, 3),
}


class Operations(TorchDispatchMode):
    """Collects each operation with the forms of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[object] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        forms = [(x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in tensors]
        self.found.add((func, tuple(forms)))
        return func(*args, **(kwargs or {}))


def longer(path: str) -> str:
    """Repeat the layers of a model COPIES times in its config.json, for random weights."""
    file = Path(path) / "config.json"
    config = json.loads(file.read_text())
    for key, value in list(config.items()):
        per_layer = key in ("layer_types", "no_rope_layers") and value is not None
        if per_layer or key == "num_hidden_layers":
            config[key] = value * COPIES
    file.write_text(json.dumps(config))
    return path


@torch.inference_mode()
def operations(engine: Engine, most_layers: int | None) -> set[object]:
    runner = engine._launcher.runner
    tokens = torch.zeros((len(runner.padding), 5), dtype=torch.int32)
    tokens[:] = torch.tensor(runner.padding)[:, None]
    with Operations() as mode:
        runner.model.logits(runner.run(tokens, _NoAttention(), most_layers))
    return mode.found


@pytest.mark.parametrize("family", MODELS)
def test_few_layers_launch_the_operations_of_all(family: str, tmp_path: Path) -> None:
    engine = make_engine(longer(build_model(family, tmp_path)), dummy_weight=True)
    count = layers_to_rehearse(engine._launcher.runner)
    assert (len(engine._launcher.runner.model.model.layers), count) == MODELS[family]
    assert operations(engine, count) == operations(engine, None)


@pytest.mark.parametrize("form", FORMATS)
def test_a_format_of_quantised_weights_has_few_kinds(form: str, tmp_path: Path) -> None:
    """Some formats leave one linear of a layer unquantised. This layer is then of another kind."""
    engine = make_engine(longer(build_fp8(form, "llama", tmp_path).fp8), dummy_weight=True)
    count = layers_to_rehearse(engine._launcher.runner)
    assert count < 6
    assert operations(engine, count) == operations(engine, None)


def test_a_changed_layer_is_of_another_kind(tmp_path: Path) -> None:
    engine = make_engine(longer(build_model("qwen3", tmp_path)), dummy_weight=True)
    runner, layers = engine._launcher.runner, engine._launcher.runner.model.model.layers

    def unaligned() -> None:
        weight = layers[3].mlp.down_proj.method.weight
        moved = torch.zeros(weight.numel() + 1)[1:].view(weight.shape)
        weight.data = moved.copy_(weight.data)

    def without_semaphores() -> None:
        layers[3].mlp.down_proj.method.split_k_semaphores = None

    changes: list[Callable[[], None]] = [unaligned, without_semaphores]
    for change in changes:
        change()
        # The layers 3 and 4 are new kinds: one is changed, the other follows the changed one.
        assert layers_to_rehearse(runner) == 5
        few, all_layers = operations(engine, 5), operations(engine, None)
        assert few == all_layers
    layers[3].mlp.down_proj.method.__class__ = OtherLinear
    assert layers_to_rehearse(runner) == len(layers), "the method of another package is not known"


class OtherLinear(UnquantizedLinear):
    """A method of another package."""


def _of_ranks(comm: Any, path: str) -> int:
    return layers_to_rehearse(make_engine(path, comm, dummy_weight=True)._launcher.runner)


def test_ranks_run_all_layers(tmp_path: Path) -> None:
    path = longer(build_model("qwen3", tmp_path))
    assert run_ranks(2, tmp_path, _of_ranks, path) == [6, 6]
