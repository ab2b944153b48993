"""A model with FP8 weights gives the tokens of transformers with the same, dequantised, weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from minisgl.distributed.comm import SingleCommunicator
from minisgl.quantization.experts import Fp8Experts
from minisgl.quantization.linear import Fp8Linear
from tests.parity.driver import Driver, make_engine
from tests.parity.fp8_models import FORMATS, Saved, build_fp8
from tests.parity.models import VOCAB_SIZE, transformers_greedy, transformers_logits
from tests.parity.rank_cases import (
    OUTPUT_TOKENS,
    RankCase,
    prompts,
    prove,
    run_cases,
    run_on,
)
from tests.parity.test_engine_parity import prompt_of

Build = Callable[[str, str], Saved]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    folder = tmp_path_factory.mktemp("fp8")
    return lambda form, family: build_fp8(form, family, folder)


def formats_in(path: str) -> set[type]:
    model = make_engine(path)._launcher.runner.model
    return {type(module) for module in model.modules()} & {Fp8Linear, Fp8Experts}


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-moe"])
@pytest.mark.parametrize("form", FORMATS)
def test_tokens_are_those_of_the_dequantised_weights(form: str, family: str, build: Build) -> None:
    saved, prompt = build(form, family), prompt_of(41)
    tokens = Driver(make_engine(saved.fp8)).generate(0, prompt, 8)
    assert tokens == transformers_greedy(saved.reference, prompt, 8)
    expected = {Fp8Linear, Fp8Experts} if family == "qwen3-moe" else {Fp8Linear}
    assert formats_in(saved.fp8) == expected


@pytest.mark.parametrize("family", ["phi3", "granite", "olmo2", "qwen2-moe", "ministral3"])
@pytest.mark.parametrize("form", ["block", "tensor-transformers", "compressed-channel"])
def test_other_families_give_the_tokens_of_the_dequantised_weights(
    form: str, family: str, build: Build
) -> None:
    saved, prompt = build(form, family), prompt_of(41)
    tokens = Driver(make_engine(saved.fp8)).generate(0, prompt, 8)
    assert tokens == transformers_greedy(saved.reference, prompt, 8)


@pytest.mark.parametrize("form", ["block", "compressed-channel"])
@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_change_nothing(form: str, chunk: int, build: Build) -> None:
    saved, prompt = build(form, "qwen3-moe"), prompt_of(23)
    tokens = Driver(make_engine(saved.fp8)).generate(2, prompt, 8, chunk)
    assert tokens == transformers_greedy(saved.reference, prompt, 8)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-moe"])
def test_logits_equal_transformers_reading_of_the_same_file(
    family: str, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers dequantises the FP8 file itself.

    Its check for accelerate is switched off, because that package only moves layers to devices.
    """
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
    ("block", RankCase("llama", 7, "radix", overlap=True, crowded=False, aborts=False)),
    ("block", RankCase("llama-odd", 64, "naive", overlap=True, crowded=True, aborts=False)),
    ("block", RankCase("qwen3-moe", 64, "radix", overlap=False, crowded=False, aborts=True)),
    ("compressed-channel", RankCase("qwen3-moe", 7, "radix", True, False, aborts=False)),
    ("modelopt", RankCase("qwen3", 64, "naive", overlap=True, crowded=True, aborts=False)),
    ("block", RankCase("phi3", 7, "radix", overlap=True, crowded=False, aborts=False)),
    ("block", RankCase("olmo2", 7, "radix", overlap=True, crowded=False, aborts=False)),
    ("block", RankCase("qwen2-moe", 64, "radix", overlap=True, crowded=False, aborts=False)),
    ("compressed-channel", RankCase("granite", 64, "radix", True, False, aborts=False)),
]


@pytest.mark.parametrize(("size", "chosen"), [(2, CASES), (4, CASES[1:3])])
def test_ranks_give_the_tokens_of_the_dequantised_weights(
    size: int, chosen: list[tuple[str, RankCase]], build: Build, tmp_path: Path
) -> None:
    """With 384 rows a block spans two ranks; with 330 rows the last rank has padding."""
    paths = {f"{form} {case.family}": build(form, case.family) for form, case in chosen}
    cases = [case for _, case in chosen]
    for path, (form, case) in zip(paths.values(), chosen, strict=True):
        case.engine["model_path"] = path.fp8
        assert form in path.fp8
    own = {case.family: "" for case in cases}
    outcomes = run_on(size, cases, own, tmp_path)
    for index, (form, case) in enumerate(chosen):
        first, *others = (of_rank[index] for of_rank in outcomes)
        assert all(other == first for other in others), "the ranks differ"
        prove(case, first)
        reference = paths[f"{form} {case.family}"].reference
        expected = [transformers_greedy(reference, prompt, OUTPUT_TOKENS) for prompt in prompts()]
        for tokens, wanted in zip(first.tokens, expected * 2, strict=True):
            assert tokens == wanted[: len(tokens)]


@pytest.mark.parametrize("family", ["qwen3-moe", "phi3"])
def test_online_weights_do_not_depend_on_the_ranks(
    family: str, build: Build, tmp_path: Path
) -> None:
    case = RankCase(family, 64, "radix", overlap=True, crowded=False, aborts=False)
    case.engine["quantization"] = "fp8"
    paths = {family: build("block", family).reference}
    (alone,) = run_cases(SingleCommunicator(), str(tmp_path), [case], paths)
    first, second = run_on(2, [case], paths, tmp_path)
    assert first == second
    assert first[0].tokens == alone.tokens


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
