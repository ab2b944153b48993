"""Models with recurrent states: scheduler and engine give the tokens of transformers.

Chunks, overlap, preemption, drafts, ranks and constraints are varied. The requests share rows and
beginnings, and must not read each other's states.
"""

from collections.abc import Callable, Iterable
from functools import cache
from itertools import repeat
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from minisgl.core import SamplingParams
from minisgl.distributed.comm import SingleCommunicator
from minisgl.drafts import ngram
from minisgl.engine.step import GraphStep
from minisgl.kvcache import states
from tests.parity import rank_cases
from tests.parity.drafter import drafts_of
from tests.parity.driver import Driver, make_engine
from tests.parity.fp8_models import build_fp8
from tests.parity.hybrid_models import BASE, save
from tests.parity.models import VOCAB_SIZE, transformers_greedy
from tests.parity.rank_cases import RankCase, run_on
from tests.parity.test_scheduler_parity import Case, prove, run
from tests.process.tiny_model import build_tiny_model
from tests.unit.engine.emulated_graphs import emulate_decode_graphs
from tests.unit.scheduler.drafts import ChangingDrafts
from tests.unit.structured.grammars import Run, check_answers, random_tasks, run_tasks

ModelPath = Callable[[str], str]
TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def hybrid_path(tmp_path_factory: pytest.TempPathFactory) -> ModelPath:
    folder: Path = tmp_path_factory.mktemp("hybrids")
    return cache(lambda name: save(name, folder)[1])


@pytest.fixture(autouse=True)
def few_tokens_for_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts of these tests are shorter than those whose states a server saves."""
    monkeypatch.setattr(states, "MIN_NEW_TOKENS", 16)


def texts() -> list[list[int]]:
    """Five prompts of 14 to 70 tokens; three share a beginning."""
    rng = np.random.default_rng(7)
    stem = rng.integers(3, VOCAB_SIZE, 50).tolist()
    lengths = [(50, 20), (14, 1), (0, 14), (33, 12), (0, 15)]
    return [stem[:shared] + rng.integers(3, VOCAB_SIZE, own).tolist() for shared, own in lengths]


def expected(path: str, guesses: Iterable[list[int]] = repeat([])) -> list[list[int]]:
    """The tokens of transformers after the prompts. guesses: as in transformers_greedy."""
    return [
        transformers_greedy(path, prompt, TOKENS, guess=guess)
        for prompt, guess in zip(texts(), guesses, strict=False)
    ]


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("qwen3_5", Case(16, "naive", overlap=False, crowded=False, page_size=16)),
        ("qwen3_5", Case(32, "radix", overlap=True, crowded=False, page_size=16)),
        ("qwen3_5-ends-with-delta", Case(64, "naive", overlap=True, crowded=True, page_size=16)),
        ("qwen3_next", Case(64, "radix", overlap=True, crowded=False, page_size=16)),
        ("granite4", Case(16, "radix", overlap=True, crowded=False, page_size=16)),
        ("granite4-groups", Case(64, "naive", overlap=True, crowded=True, page_size=16)),
        ("nemotron_h", Case(16, "radix", overlap=True, crowded=False, page_size=16)),
        ("nemotron_h-dense", Case(64, "naive", overlap=True, crowded=True, page_size=16)),
    ],
    ids=str,
)
def test_greedy_tokens_equal_those_of_transformers(
    name: str, case: Case, hybrid_path: ModelPath
) -> None:
    path = hybrid_path(name)
    outputs, scheduler, recorder = run(path, case, [GREEDY], texts=texts())
    prove(case, scheduler, recorder)
    assert outputs == expected(path, outputs) * case.waves


@pytest.mark.parametrize("name", ["qwen3_5", "granite4-experts", "nemotron_h"])
def test_chunks_may_end_inside_a_page(name: str, hybrid_path: ModelPath) -> None:
    path, prompt = hybrid_path(name), texts()[0]
    engine = make_engine(path, page_size=16)
    for row, chunk in enumerate((1, 7)):
        tokens = Driver(engine).generate(row, prompt, TOKENS, chunk=chunk)
        assert tokens == transformers_greedy(path, prompt, TOKENS, guess=tokens)


@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        ("qwen3_5", "n-gram"),
        ("qwen3_5", "half right"),
        ("granite4-ends-with-mamba", "half right"),
    ],
)
def test_drafts_and_decode_graphs_change_no_token(
    name: str, drafter: str, hybrid_path: ModelPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, drafts = hybrid_path(name), ChangingDrafts(7)
    graphs = emulate_decode_graphs(monkeypatch)
    if drafter != "n-gram":
        sequences = [p + o for p, o in zip(texts(), expected(path), strict=True)]
        monkeypatch.setattr(ngram, "find_drafts", drafts_of(sequences, drafter))
    case = Case(64, "radix", overlap=True, crowded=False, page_size=16)
    outputs, scheduler, recorder = run(path, case, [GREEDY], drafts, texts=texts())
    assert outputs == expected(path) * 2
    prove(case, scheduler, recorder)
    assert {batch.width for batch in recorder.batches} == {1, 2, 4, 8}
    assert any(isinstance(step, GraphStep) for _, step in graphs)
    assert drafter == "n-gram" or 0 < drafts.agreed < drafts.drafted


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_5-ends-with-delta",  # both ranks have the only key head
        pytest.param("qwen3_next", marks=pytest.mark.proof),
        pytest.param("granite4", marks=pytest.mark.proof),  # both ranks have the only group
        pytest.param("nemotron_h", marks=pytest.mark.proof),
    ],
)
def test_two_ranks_give_the_tokens_of_transformers(
    name: str, hybrid_path: ModelPath, tmp_path: Path
) -> None:
    case = RankCase(name, 16, "naive", overlap=True, crowded=False, aborts=False, page_size=16)
    paths = {name: hybrid_path(name)}
    (first,), (second,) = run_on(2, [case], paths, tmp_path)
    assert first == second
    rank_cases.prove(case, first)
    for prompt, tokens in zip(rank_cases.prompts(), first.tokens, strict=True):
        assert tokens == transformers_greedy(paths[name], prompt, len(tokens), guess=tokens)


def test_fp8_weights_give_the_tokens_of_the_dequantised_weights(tmp_path: Path) -> None:
    saved = build_fp8("block", "qwen3_5", tmp_path)
    prompt = texts()[0]
    tokens = Driver(make_engine(saved.fp8, page_size=16)).generate(0, prompt, 8, chunk=33)
    assert tokens == transformers_greedy(saved.reference, prompt, 8, guess=tokens)


def test_constraints_give_the_same_answers_in_other_steps(tmp_path: Path) -> None:
    """Forced tokens are chunks that begin inside a page."""
    path = str(build_tiny_model(tmp_path))
    plain = transformers.AutoConfig.from_pretrained(path)
    sizes = BASE | {"vocab_size": plain.vocab_size, "eos_token_id": plain.eos_token_id}
    config = transformers.Qwen3_5TextConfig(**sizes)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tasks, engine = random_tasks(8, 3), {"page_size": 16}
    first, second = (
        run_tasks(SingleCommunicator(), "", path, run, tasks)
        for run in (Run(engine=engine, overlap=False), Run(engine=engine, chunk=16, drafts=True))
    )
    assert second.tokens == first.tokens
    assert check_answers(path, Run(), tasks, second) >= 5
    assert second.totals.constraints.forced_tokens > 0
