"""A model with 4-bit weights gives the tokens of transformers with the weights of their codes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minisgl.distributed.comm import Communicator, SingleCommunicator
from minisgl.quantization.packed_methods import PackedExperts, PackedLinear
from tests.parity.driver import Driver, make_engine
from tests.parity.models import transformers_greedy
from tests.parity.packed_models import FORMATS, Saved, build_packed
from tests.parity.test_engine_parity import prompt_of
from tests.unit.distributed.ranks import run_ranks

Build = Callable[[str, str], Saved]
# Formats whose experts are supported.
EXPERTS = [name for name, form in FORMATS.items() if not form.is_nvfp4 and not form.ordered]
# Its shared expert is unquantised.
SHARED = "awq-shared", "qwen2-moe"
CASES: list[Any] = [(form, "llama") for form in FORMATS]
CASES += [(form, "qwen3-moe" if form in EXPERTS else "granite") for form in FORMATS]
CASES = [case for case in CASES if case[0] != SHARED[0]] + [SHARED]
# phi3 stores merged projections. One format of each way to pack them, and the others in a proof.
MERGED = ["awq", "gptq-order", "compressed-zeros", "compressed-nvfp4"]
CASES += [
    pytest.param(form, "phi3", marks=() if form in MERGED else pytest.mark.proof)
    for form in FORMATS
    if form != SHARED[0]
]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    folder = tmp_path_factory.mktemp("packed")
    return lambda form, family: build_packed(form, family, folder)


def methods_in(path: str) -> set[type]:
    model = make_engine(path)._launcher.runner.model
    return {type(module) for module in model.modules()} & {PackedLinear, PackedExperts}


@pytest.mark.parametrize(("form", "family"), CASES)
def test_tokens_are_those_of_the_dequantised_weights(form: str, family: str, build: Build) -> None:
    saved, prompt = build(form, family), prompt_of(41)
    tokens = Driver(make_engine(saved.packed)).generate(0, prompt, 6)
    assert tokens == transformers_greedy(saved.reference, prompt, 6, guess=tokens)


def test_linears_and_experts_stay_packed_in_memory(build: Build) -> None:
    assert methods_in(build("awq", "llama").packed) == {PackedLinear}
    assert methods_in(build("gptq", "qwen3-moe").packed) == {PackedLinear, PackedExperts}


@pytest.mark.parametrize("form", ["awq", "gptq-order", "compressed-nvfp4"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_hybrids_give_the_tokens_of_the_dequantised_weights(
    form: str, family: str, build: Build
) -> None:
    saved, prompt = build(form, family), prompt_of(41)
    tokens = Driver(make_engine(saved.packed, page_size=16)).generate(0, prompt, 6)
    assert tokens == transformers_greedy(saved.reference, prompt, 6, guess=tokens)


RANKS = [
    ("awq", "llama"),
    ("awq", "phi3"),
    ("awq", "qwen2-moe"),
    SHARED,
    ("gptq-zeros", "qwen3-moe"),
    ("gptq-channel", "llama"),
    ("compressed", "qwen3-moe"),  # 3 groups of inner columns: the second rank has padding
    ("compressed-channel", "qwen3-moe"),
    ("compressed-nvfp4", "llama"),
    ("modelopt-nvfp4", "phi3"),
]


def all_generate(comm: Communicator, models: list[dict[str, Any]]) -> list[list[int]]:
    """Return the 5 tokens of each model after a prompt that is prefilled in chunks of 21.

    models: arguments of make_engine.
    """
    engines = (make_engine(comm=comm, **model) for model in models)
    return [Driver(engine).generate(0, prompt_of(41), 5, 21) for engine in engines]


def test_ranks_give_the_tokens_of_the_dequantised_weights(build: Build, tmp_path: Path) -> None:
    """Models with random weights, and those rounded at load, do not depend on the ranks either."""
    saved = [build(form, family) for form, family in RANKS]
    models: list[dict[str, Any]] = [{"path": each.packed} for each in saved]
    others: list[dict[str, Any]] = [
        {"path": build("compressed", "qwen3-moe").reference, "quantization": "int4"},
        {"path": build("awq", "qwen3-moe").packed, "dummy_weight": True},
    ]
    found = run_ranks(2, tmp_path, all_generate, models + others)
    expected = [
        transformers_greedy(model.reference, prompt_of(41), 5, guess=tokens)
        for model, tokens in zip(saved, found[0], strict=False)
    ]
    expected += all_generate(SingleCommunicator(), others)
    assert found == [expected] * 2
