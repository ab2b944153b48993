"""Drafts change no constrained answer, with n-gram, right, wrong and half right drafts.

A model with random weights answers random grammars, so the masks get no help from the model.
"""

import json
from dataclasses import replace
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from minisgl.core import FinishReason
from minisgl.distributed.comm import SingleCommunicator
from minisgl.models.config import load_model_spec
from tests.parity.drafter import drafts_of, run_with_right_drafts
from tests.process.tiny_model import build_tiny_model
from tests.unit.distributed.ranks import run_ranks
from tests.unit.scheduler.drafts import DRAFTERS
from tests.unit.structured.grammars import (
    Outcome,
    Run,
    Task,
    check_answers,
    prompt_of,
    random_tasks,
    repeated_tasks,
    run_tasks,
)

RUNS: dict[str, dict[str, Any]] = {
    "overlap": {"chunk": 16},
    "plain": {"overlap": False},
    "crowded": {"crowded": True, "cache_type": "naive", "free": True},
    "sampled": {"forced": False, "params": {"top_k": 30, "top_p": 0.9}},
    "cold": {"params": {"temperature": 0.3, "ignore_eos": True}},
    "stopped": {"params": {"stop_token_ids": (61,), "top_k": 20}},
    "greedy": {"params": {"temperature": 0.0, "max_tokens": 57}},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny_model(tmp_path_factory.mktemp("tiny")))


def tasks_of(seed: int) -> list[Task]:
    return [*random_tasks(9, seed), *repeated_tasks()]


@cache
def without_drafts(path: str, name: str) -> Outcome:
    run = Run(**RUNS[name])
    return run_tasks(SingleCommunicator(), "", path, run, tasks_of(len(name)))


# The first three runs have right, wrong and half right drafts. The others have n-gram drafts.
@pytest.mark.parametrize(
    ("name", "drafter"),
    [*zip_longest(RUNS, DRAFTERS, fillvalue="n-gram")],
)
def test_drafts_change_no_constrained_answer(
    name: str, drafter: str, path: str, tmp_path: Path
) -> None:
    tasks, run = tasks_of(len(name)), Run(**RUNS[name], drafts=True)
    plain = without_drafts(path, name)
    sequences = [prompt_of(uid) + tokens for uid, tokens in enumerate(plain.tokens)]
    find = None if drafter == "n-gram" else drafts_of(sequences, drafter)
    drafted = run_tasks(SingleCommunicator(), str(tmp_path), path, run, tasks, find)
    assert drafted.tokens == plain.tokens
    assert drafted.ends == plain.ends
    assert check_answers(path, run, tasks, drafted) >= 6
    assert drafted.errors == plain.errors
    dead_ends = name == "stopped"  # some texts can go on only with the stop token
    assert (FinishReason.ERROR in drafted.ends) == dead_ends
    totals, counted = drafted.totals, drafted.totals.drafts
    assert (totals.preemptions_total > 0) == run.crowded
    assert (totals.overlapped_steps_total > 0) == run.overlap
    assert (totals.constraints.forced_tokens > 0) == run.forced
    assert sum(counted.drafted) > 0
    assert (sum(counted.accepted) > 0) == (drafter != "wrong")
    # After a dead end no draft is right.
    assert dead_ends or (counted.accepted == counted.drafted) == (drafter == "right")


def test_drafts_of_a_model_with_windows_change_no_constrained_answer(tmp_path: Path) -> None:
    config = build_tiny_model(tmp_path) / "config.json"
    windows = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    layers = {"layer_types": ["full_attention", "sliding_attention"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | windows | layers))
    assert load_model_spec(str(tmp_path)).window == 9
    tasks, path = [*random_tasks(5, seed=3), *repeated_tasks() * 2], str(tmp_path)
    plain, drafted = (
        run_tasks(SingleCommunicator(), path, path, Run(drafts=drafts), tasks)
        for drafts in (False, True)
    )
    assert drafted.tokens == plain.tokens
    assert drafted.ends == plain.ends
    assert sum(drafted.totals.drafts.accepted) > 0


@pytest.mark.parametrize(
    ("name", "drafts"),
    [
        ("overlap", True),
        ("plain", True),
        ("crowded", False),
        ("stopped", False),
    ],
)
def test_withheld_masks_change_no_answer(
    name: str, drafts: bool, path: str, tmp_path: Path
) -> None:
    """The answers are those of other steps, in which no row waits for its mask."""
    tasks, run = tasks_of(len(name)), Run(**RUNS[name], drafts=drafts, withheld=True)
    plain = without_drafts(path, name)
    found = run_tasks(SingleCommunicator(), str(tmp_path), path, run, tasks)
    assert found.tokens == plain.tokens
    assert found.ends == plain.ends
    assert found.errors == plain.errors
    assert found.totals.constraints.withheld > 30
    assert found.totals.nonfinite_rows_total == 0


@pytest.mark.parametrize(("drafts", "logprobs", "crowded"), [(True, None, False), (False, 2, True)])
def test_two_ranks_that_withhold_other_masks_give_the_answers_of_one(
    drafts: bool, logprobs: int | None, crowded: bool, path: str, tmp_path: Path
) -> None:
    """With log-probabilities the ranks gather the logits before the masks.

    The reference has neither drafts nor withheld masks. The drafts are right, because only some
    runs accept drafts of n-grams.
    """
    tasks, params = tasks_of(3), {"logprobs": logprobs}
    one = Run(free=True, params=params)
    plain = run_tasks(SingleCommunicator(), str(tmp_path), path, one, tasks)
    assert check_answers(path, one, tasks, plain) >= 6
    sequences = [prompt_of(uid) + tokens for uid, tokens in enumerate(plain.tokens)]
    withheld = replace(one, drafts=drafts, crowded=crowded, withheld=True, chunk=16)
    outcomes: list[Outcome] = run_ranks(
        2, tmp_path, run_with_right_drafts, str(tmp_path), path, withheld, tasks, sequences
    )
    for outcome in outcomes:
        assert outcome.tokens == plain.tokens
        assert outcome.ends == plain.ends
        assert outcome.totals.constraints.withheld > 30
        assert (sum(outcome.totals.drafts.accepted) > 0) == drafts
        assert (outcome.totals.preemptions_total > 0) == crowded
