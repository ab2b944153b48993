"""Drafts change no token: greedy and random draws, with n-gram, right, wrong and half right drafts.

Chunk size, prefix cache, overlap, preemption and page size are varied as in test_scheduler_parity.
Requests with edited logits or log-probabilities run beside requests with drafts.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest

from minisgl.core import SamplingParams
from minisgl.drafts import ngram
from tests.parity.drafter import drafts_of
from tests.parity.test_scheduler_parity import (
    CASES,
    OUTPUT_TOKENS,
    UNLIMITED,
    Case,
    ModelPath,
    prompts,
    prove,
    run,
)
from tests.unit.scheduler.drafts import DRAFTERS, PREDICTIONS, ChangingDrafts

PLAIN = Case(UNLIMITED, "naive", overlap=False, crowded=False)
GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
DRAWN = SamplingParams(
    temperature=0.9, top_p=0.95, min_p=0.01, seed=3, max_tokens=OUTPUT_TOKENS, ignore_eos=True
)
MIXED = [
    GREEDY,
    DRAWN,
    SamplingParams(
        temperature=0.8, frequency_penalty=0.7, seed=5, max_tokens=OUTPUT_TOKENS, ignore_eos=True
    ),
    SamplingParams(temperature=1.1, top_k=30, seed=1, logprobs=2, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=7, stop_token_ids=(11,), min_tokens=3),
    SamplingParams(temperature=1.4, seed=8, max_tokens=OUTPUT_TOKENS, ignore_eos=True),
]
KINDS = {"greedy": [GREEDY], "drawn": [DRAWN], "mixed": MIXED}


@cache
def without_drafts(path: str, kind: str) -> list[list[int]]:
    return run(path, PLAIN, KINDS[kind])[0]


def alternating(
    cases: list[int], others: Iterable[str], kinds: list[str]
) -> list[tuple[int, str, str]]:
    """Return each case with each of the others. The kinds alternate, so that each pair occurs."""
    return [
        (case, other, kinds[(row + column) % len(kinds)])
        for row, case in enumerate(cases)
        for column, other in enumerate(others)
    ]


def proofs(cases: list[tuple[int, str, str]]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.proof) for case in cases]


@pytest.mark.parametrize(
    ("index", "drafter", "kind"),
    [
        (1, "n-gram", "greedy"),  # chunks of one token
        (1, "half right", "mixed"),
        *alternating([2, 5], ["n-gram", *DRAFTERS], ["greedy", "drawn", "mixed"]),
        (4, "n-gram", "drawn"),
        (6, "n-gram", "greedy"),
        *proofs(alternating([4, 6], DRAFTERS, ["mixed", "greedy", "drawn"])),
    ],
)
def test_drafts_change_no_token(
    index: int,
    drafter: str,
    kind: str,
    model_path: ModelPath,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_drafts(model_path("qwen3"), CASES[index], drafter, kind, monkeypatch)


def check_drafts(
    path: str, case: Case, drafter: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare the tokens of a run with drafts with those of another run without."""
    expected = without_drafts(path, kind) * case.waves
    if drafter != "n-gram":
        sequences = [p + o for p, o in zip(prompts() * case.waves, expected, strict=True)]
        monkeypatch.setattr(ngram, "find_drafts", drafts_of(sequences, drafter))
    drafts = ChangingDrafts(7)
    outputs, scheduler, recorder = run(path, case, KINDS[kind], drafts)
    assert outputs == expected
    if kind != "mixed":
        prove(case, scheduler, recorder)
    widths = {batch.width for batch in recorder.batches}
    needed = {1, 4, 8} if drafter == "right" else {1, 2, 4, 8}  # right drafts end sooner
    assert needed <= widths <= {1, 2, 4, 8}
    if drafter != "n-gram" and kind != "mixed":
        assert (drafts.agreed > 0) == (drafter != "wrong")
        assert (drafts.agreed == drafts.drafted) == (drafter == "right")


@pytest.mark.parametrize(
    ("family", "index", "drafter", "kind"),
    [
        ("gpt-oss", 2, "half right", "drawn"),
        ("gpt-oss", 5, "n-gram", "mixed"),
        ("gemma2", 4, "wrong", "greedy"),
        ("gemma3-linear", 2, "right", "greedy"),
        ("olmo3-yarn-tied", 6, "half right", "mixed"),
    ],
)
def test_drafts_of_models_with_windows_change_no_token(
    family: str,
    index: int,
    drafter: str,
    kind: str,
    model_path: ModelPath,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_drafts(model_path(family), CASES[index], drafter, kind, monkeypatch)


@pytest.mark.parametrize(
    ("index", "prediction", "kind"),
    [
        *alternating([2], PREDICTIONS, ["drawn", "mixed"]),
        *proofs(alternating([5], PREDICTIONS, ["mixed", "drawn"])),
    ],
)
def test_predictions_change_no_token(
    index: int, prediction: str, kind: str, model_path: ModelPath
) -> None:
    """Predictions fill the room for the output, or more; preempted requests keep theirs."""
    path, case = model_path("qwen3"), CASES[index]
    expected = without_drafts(path, kind) * case.waves
    predictions = [PREDICTIONS[prediction](output) for output in expected]
    outputs, scheduler, recorder = run(path, case, KINDS[kind], ChangingDrafts(7), predictions)
    assert outputs == expected
    if kind != "mixed":
        prove(case, scheduler, recorder)
    # The first two tokens of an output find the prediction, and four requests of six draft.
    drafted = sum(len(output) - 3 for output in expected) * (0.5 if kind == "mixed" else 1)
    if prediction in ("none", "wrong"):
        assert recorder.predicted < 0.1 * drafted
    elif prediction in ("right", "too long"):
        assert recorder.predicted > 0.9 * drafted
