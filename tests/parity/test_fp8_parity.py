"""A model with FP8 weights gives the tokens of transformers with the same, dequantised, weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from minisgl.distributed.comm import Communicator, SingleCommunicator
from minisgl.quantization.experts import Fp8Experts
from minisgl.quantization.linear import Fp8Linear
from tests.parity.driver import Driver, make_engine
from tests.parity.fp8_models import FORMATS, Saved, build_fp8
from tests.parity.models import VOCAB_SIZE, transformers_greedy, transformers_logits
from tests.parity.test_engine_parity import prompt_of
from tests.unit.distributed.ranks import run_ranks

Build = Callable[[str, str], Saved]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    folder = tmp_path_factory.mktemp("fp8")
    return lambda form, family: build_fp8(form, family, folder)


def formats_in(path: str) -> set[type]:
    model = make_engine(path)._launcher.runner.model
    return {type(module) for module in model.modules()} & {Fp8Linear, Fp8Experts}


# Few cases load each format and each family. `make proof` runs all pairs.
PROOF = pytest.mark.proof
PAIRS = [
    *((form, family) for form in FORMATS for family in ("llama", "qwen3-moe")),
    ("block", "qwen3"),
    *(pytest.param(form, "qwen3", marks=PROOF) for form in FORMATS if form != "block"),
]
OTHER_FAMILIES = ["phi3", "granite", "olmo2", "qwen2-moe", "ministral3"]
OTHER_PAIRS = [
    pytest.param(form, family, marks=() if (row + column) % 3 == 0 else PROOF)
    for row, form in enumerate(["block", "tensor-transformers", "compressed-channel"])
    for column, family in enumerate(OTHER_FAMILIES)
]


@pytest.mark.parametrize(("form", "family"), PAIRS)
def test_tokens_are_those_of_the_dequantised_weights(form: str, family: str, build: Build) -> None:
    saved, prompt = build(form, family), prompt_of(41)
    tokens = Driver(make_engine(saved.fp8)).generate(0, prompt, 8)
    assert tokens == transformers_greedy(saved.reference, prompt, 8, guess=tokens)
    expected = {Fp8Linear, Fp8Experts} if family == "qwen3-moe" else {Fp8Linear}
    assert formats_in(saved.fp8) == expected


@pytest.mark.parametrize(("form", "family"), OTHER_PAIRS)
def test_other_families_give_the_tokens_of_the_dequantised_weights(
    form: str, family: str, build: Build
) -> None:
    saved, prompt = build(form, family), prompt_of(41)
    tokens = Driver(make_engine(saved.fp8)).generate(0, prompt, 8)
    assert tokens == transformers_greedy(saved.reference, prompt, 8, guess=tokens)


@pytest.mark.parametrize("form", ["block", "compressed-channel"])
@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_change_nothing(form: str, chunk: int, build: Build) -> None:
    saved, prompt = build(form, "qwen3-moe"), prompt_of(23)
    tokens = Driver(make_engine(saved.fp8)).generate(2, prompt, 8, chunk)
    assert tokens == transformers_greedy(saved.reference, prompt, 8, guess=tokens)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-moe"])
def test_logits_equal_transformers_reading_of_the_same_file(
    family: str, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers dequantises the FP8 file itself.

    Its check for accelerate is switched off, because that package only moves layers to devices.
    """
    # The ranks import this module too, and do not need the seconds of this import.
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *a, **k: None)
    saved, prompt = build("block", family), prompt_of(60)
    settings = transformers.FineGrainedFP8Config(
        dequantize=True, modules_to_not_convert=["lm_head", "model.layers.1.self_attn.o_proj"]
    )
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        saved.fp8,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        quantization_config=settings,
    )
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0, -1].float()
    torch.testing.assert_close(logits_of(saved.fp8, prompt), expected, atol=1e-3, rtol=1e-3)


def logits_of(path: str, prompt: list[int], folded: bool = False) -> torch.Tensor:
    """The logits after the prompt, float32 [V]."""
    engine = make_engine(path)
    model = engine._launcher.runner.model
    if folded:
        model.fold_norms()
    seen: list[torch.Tensor] = []
    compute = model.lm_head.logits

    def spy(hidden: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        seen.append(compute(hidden, out))
        return seen[-1]

    model.lm_head.logits = spy  # type: ignore[method-assign]
    Driver(engine).generate(0, prompt, 1)
    return seen[0][0]


@pytest.mark.parametrize("family", ["llama-odd", "qwen3", "qwen3-moe", "phi3", "granite", "olmo2"])
@pytest.mark.parametrize("form", ["block", "compressed-tensor"])
def test_logits_are_close_with_norms_inside_the_linears(
    form: str, family: str, build: Build
) -> None:
    """In bfloat16 on one rank, a linear applies the norm before it with the norm's weight."""
    saved, prompt = build(form, family), prompt_of(60)
    expected = transformers_logits(saved.reference, prompt)[-1]
    found = logits_of(saved.fp8, prompt, folded=True)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


CASES = [
    ("block", "llama"),
    ("block", "llama-odd"),
    ("block", "qwen3-moe"),
    ("compressed-channel", "qwen3-moe"),
    ("modelopt", "qwen3"),
    ("block", "phi3"),
    ("block", "olmo2"),
    ("block", "qwen2-moe"),
    ("compressed-channel", "granite"),
]


def all_generate(
    comm: Communicator, paths: list[str], quantization: str | None = None
) -> list[list[int]]:
    """Return the 6 tokens of each model after a prompt that is prefilled in chunks of 21."""
    engines = (make_engine(path, comm, quantization=quantization) for path in paths)
    return [Driver(engine).generate(0, prompt_of(41), 6, 21) for engine in engines]


@pytest.mark.parametrize(("size", "chosen"), [(2, CASES), (4, CASES[1:3])])
def test_ranks_give_the_tokens_of_the_dequantised_weights(
    size: int, chosen: list[tuple[str, str]], build: Build, tmp_path: Path
) -> None:
    """With 384 rows a block spans two ranks; with 330 rows the last rank has padding."""
    saved = [build(form, family) for form, family in chosen]
    found = run_ranks(size, tmp_path, all_generate, [model.fp8 for model in saved])
    expected = [
        transformers_greedy(model.reference, prompt_of(41), 6, guess=tokens)
        for model, tokens in zip(saved, found[0], strict=True)
    ]
    assert found == [expected] * size


def test_online_weights_do_not_depend_on_the_ranks(build: Build, tmp_path: Path) -> None:
    paths = [build("block", family).reference for family in ("qwen3-moe", "phi3")]
    alone = all_generate(SingleCommunicator(), paths, "fp8")
    assert run_ranks(2, tmp_path, all_generate, paths, "fp8") == [alone] * 2


def test_online_weights_are_the_rounded_rows(build: Build) -> None:
    """The channel format stores what --quantization fp8 computes from the same weights."""
    path = build("block", "llama").reference
    exact = make_engine(path)._launcher.runner.model
    online = make_engine(path, quantization="fp8")._launcher.runner.model
    for name, module in online.named_modules():
        if isinstance(module, Fp8Linear):
            weight = exact.get_submodule(name).weight  # type: ignore[union-attr]
            assert isinstance(weight, torch.Tensor)
            found = module.weight.float() * module.scales
            assert (found - weight).abs().max() <= weight.abs().max() / 28  # half a step of e4m3
            torch.testing.assert_close(module.scales, weight.abs().amax(1, keepdim=True) / 448)


def test_random_weights_of_every_format_are_finite(build: Build) -> None:
    prompt = [int(i) % VOCAB_SIZE for i in range(20)]
    for form in FORMATS:
        path = build(form, "qwen3-moe").fp8
        engine = make_engine(path, dummy_weight=True)
        assert len(Driver(engine).generate(0, prompt, 3)) == 3
