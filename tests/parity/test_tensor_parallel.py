"""Rank processes over gloo give exactly the tokens of one rank, the same on every rank.

Prefix cache, chunk size, overlap, aborts, preemption and the kind of model are varied pairwise. The
pair of experts and whole prompts has four ranks. All cases of one group size run on the same
processes, and every run asserts the events of its case.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minisgl.distributed.comm import Communicator, SingleCommunicator
from minisgl.kernel.dispatch import sample
from minisgl.kernel.sampling import SamplingTensors
from minisgl.layers.embedding import LMHead
from tests.parity.driver import generate, make_engine
from tests.parity.models import transformers_greedy
from tests.parity.rank_cases import (
    OUTPUT_TOKENS,
    Outcome,
    RankCase,
    prompts,
    prove,
    run_cases,
    run_on,
)
from tests.unit.distributed.ranks import run_ranks

MANY = 8192
FEW_TOKENS = 5
CASES = [
    RankCase("qwen3-moe", 7, "naive", overlap=True, crowded=True, aborts=False, page_size=2),
    RankCase("qwen3-moe", 64, "radix", overlap=False, crowded=False, aborts=True, page_size=16),
    RankCase("qwen3", MANY, "naive", overlap=False, crowded=True, aborts=True, page_size=1),
    RankCase("mistral", 64, "naive", overlap=True, crowded=True, aborts=False),
    RankCase("qwen2-yarn-tied", 13, "radix", overlap=True, crowded=False, aborts=False, drawn=True),
    RankCase("exaone4-short-windows", 7, "radix", overlap=True, crowded=True, aborts=False),
    RankCase("mistral-window", MANY, "radix", overlap=True, crowded=False, aborts=False),
    RankCase("olmo3", 7, "radix", True, crowded=True, aborts=True, page_size=1, drafts=True),
    RankCase("gpt-oss-odd", 7, "radix", overlap=True, crowded=True, aborts=True, page_size=1),
    RankCase("qwen3", 7, "radix", overlap=True, crowded=True, aborts=True, kv="fp8"),
    RankCase("qwen3-moe", 64, "naive", overlap=False, crowded=False, aborts=False, kv="fp8"),
    RankCase("qwen3", 7, "radix", overlap=False, crowded=False, aborts=True, drafts=True),
    RankCase(
        "llama-linear-biases",
        64,
        "naive",
        overlap=True,
        crowded=False,
        aborts=False,
        drawn=True,
        drafts=True,
        temperature=0.3,
    ),
]
# These families share the scheduler and the caches with those above. They run without a scheduler.
FAMILIES = [
    "qwen2-moe-mixed",
    "phi3-partial-tied",
    "phi3-longrope",
    "ministral3-vision",
    "granite-biases-tied",
    "smollm3-biases",
    "seed-oss-biases",
    "olmo2",
    "exaone4",
    "gemma2",
    "gemma3-linear",
    "qwen3-vl-moe-mixed",
    "glm4-moe-biases-tied",
    "minimax-m2-odd-tied",
    "muse-glimmer",
    "gemma4-shared-experts",
]
FOUR = [  # more ranks than KV heads; 151 ids, 97 columns and experts of 39 are padded
    RankCase("qwen3", 7, "radix", overlap=True, crowded=True, aborts=True),
    RankCase("qwen3-moe-mixed", MANY, "naive", overlap=True, crowded=False, aborts=False),
]
FOUR_MORE = [
    RankCase("olmo2-one-key-head", 7, "radix", overlap=True, crowded=False, aborts=False),
    RankCase("qwen2-moe-mixed", MANY, "naive", overlap=True, crowded=False, aborts=False),
]
ModelPath = Callable[[str], str]
Runs = list[list[Outcome]]


def paths_of(cases: list[RankCase], model_path: ModelPath) -> dict[str, str]:
    return {case.family: model_path(case.family) for case in cases}


@pytest.fixture(scope="module")
def two(model_path: ModelPath, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return run_on(2, CASES, paths_of(CASES, model_path), tmp_path_factory.mktemp("two"))


def check(case: RankCase, runs: Runs, index: int, path: str, folder: Path) -> None:
    outcomes = [of_rank[index] for of_rank in runs]
    prove(case, outcomes[0])
    assert all(other == outcomes[0] for other in outcomes[1:]), "the ranks differ"
    if case.drawn:
        plain = replace(case, drafts=False)
        alone = run_cases(SingleCommunicator(), str(folder), [plain], {case.family: path})[0].tokens
    else:
        alone = [
            transformers_greedy(path, prompt, OUTPUT_TOKENS, case.kv, guess=found)
            for prompt, found in zip(prompts(), outcomes[0].tokens, strict=False)
        ] * case.waves
    for tokens, expected in zip(outcomes[0].tokens, alone, strict=True):
        assert tokens == expected[: len(tokens)]


@pytest.mark.parametrize("index", range(len(CASES)), ids=[str(case) for case in CASES])
def test_two_ranks_give_the_tokens_of_one(
    index: int, two: Runs, model_path: ModelPath, tmp_path: Path
) -> None:
    check(CASES[index], two, index, model_path(CASES[index].family), tmp_path)


@pytest.mark.parametrize("cases", [FOUR, pytest.param(FOUR_MORE, marks=pytest.mark.proof)])
def test_four_ranks_give_the_tokens_of_one(
    cases: list[RankCase], model_path: ModelPath, tmp_path: Path
) -> None:
    runs = run_on(4, cases, paths_of(cases, model_path), tmp_path)
    for index, case in enumerate(cases):
        check(case, runs, index, model_path(case.family), tmp_path)


def all_generate(comm: Communicator, paths: list[str], n: int) -> list[list[int]]:
    return [generate(comm, path, prompts()[0], n) for path in paths]


def test_two_ranks_give_the_tokens_of_every_other_family(
    model_path: ModelPath, tmp_path: Path
) -> None:
    paths = [model_path(family) for family in FAMILIES]
    outcomes = run_ranks(2, tmp_path, all_generate, paths, FEW_TOKENS)
    for family, path, *found in zip(FAMILIES, paths, *outcomes, strict=True):
        expected = transformers_greedy(path, prompts()[0], FEW_TOKENS, guess=found[0])
        assert found == [expected] * 2, family


def disagree(comm: Communicator) -> list[list[int]]:
    """Return four lists of tokens, sampled while the hidden states differ between the ranks.

    Rounding may cause such a difference. Each list has greedy and random rows. The lists are:
    sampled from each rank's logits, from the logits of all ranks, and both again with top_k.
    """
    head = LMHead(151, 64, comm)
    torch.manual_seed(comm.tp.rank)
    head.weight.data.normal_(std=0.2)
    found = []
    with torch.inference_mode():
        logits = head.logits(torch.randn(64, 64))
        for filters in (False, True):
            asked = sampling_tensors(64, filters)
            found.append(head.sample(logits, asked).tokens.tolist())
            found.append(sample(head.all_gather_logits(logits), asked).tokens.tolist())
    return found


def sampling_tensors(rows: int, filters: bool) -> SamplingTensors:
    each = torch.arange(rows)
    return SamplingTensors(
        temperature=(each % 3) * 0.7,
        top_k=torch.full((rows,), 9 if filters else 0, dtype=torch.int32),
        top_p=torch.ones(rows),
        min_p=torch.zeros(rows),
        seed=each * 977,
        position=each + 5,
        any_random=True,
        filters=filters,
    )


def start(comm: Communicator, path: str) -> int:
    """Return the pages of an engine; rank 0 has memory for 16 pages, rank 1 for 24."""
    room = (2 + comm.tp.rank) * 2**14
    return make_engine(path, comm, num_pages=None, cpu_kv_bytes=room).num_pages


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_has_the_token_that_all_logits_give(size: int, tmp_path: Path) -> None:
    """All ranks agree on the token, even if their hidden states differ.

    One rank computes each logit, and a random draw depends only on (seed, position, id).
    """
    first, *others = run_ranks(size, tmp_path, disagree)
    assert all(other == first for other in others)
    plain, of_all, filtered, filtered_of_all = first
    assert plain == of_all
    assert filtered == filtered_of_all
    assert len(set(plain)) > 30
    assert {token // 48 for token in plain} == set(range(4)), "each part gives tokens"


def test_the_smallest_rank_decides_the_pages(model_path: ModelPath, tmp_path: Path) -> None:
    assert run_ranks(2, tmp_path, start, model_path("qwen3")) == [16, 16]
