"""A model with random weights, at temperature 1, answers random grammars.

Every answer that ends by itself matches its grammar under chunks, preemption and overlap. The
masks get no help from the model.
"""

import math
from pathlib import Path

import msgspec
import pytest

from minisgl.core import FinishReason, SamplingParams
from minisgl.distributed.comm import SingleCommunicator
from minisgl.llm import LLM, Completion
from tests.process.tiny_model import build_tiny_model
from tests.unit.structured.grammars import (
    Run,
    Task,
    check_answers,
    random_tasks,
    run_tasks,
)

RUNS = {
    "chunked": Run(chunk=7),
    "crowded": Run(crowded=True, cache_type="naive"),
    "aborted": Run(aborts=True, chunk=16, crowded=True),
    "plain": Run(overlap=False, crowded=True, engine={"num_pages": 60}),
    "mixed": Run(free=True),
    "filtered": Run(params={"top_k": 30, "top_p": 0.9}),
    "penalised": Run(params={"presence_penalty": 1.0, "logit_bias": {9: 5.0}, "min_tokens": 2}),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize("name", RUNS)
def test_every_complete_answer_matches_its_grammar(name: str, path: str, tmp_path: Path) -> None:
    run = RUNS[name]
    # More requests than rows, and more again where the pages have to run out.
    tasks = random_tasks(45 if run.crowded else 24, seed=len(name))
    outcome = run_tasks(SingleCommunicator(), str(tmp_path), path, run, tasks)
    complete = check_answers(path, run, tasks, outcome)
    constrained = len(tasks) * (2 if run.free else 3) // 3
    totals = outcome.totals
    aborted = outcome.ends.count(FinishReason.ABORT)
    assert complete >= constrained * 0.8 - aborted
    assert (totals.preemptions_total > 0) == run.crowded
    assert (totals.overlapped_steps_total > 0) == run.overlap
    assert (aborted > 0) == run.aborts
    assert totals.constraints.forced_tokens > 0
    assert totals.constraints.compiles >= constrained - aborted
    if "min_tokens" not in run.params:
        assert not totals.constraints.failures


def test_a_failed_grammar_ends_its_request_alone(path: str, tmp_path: Path) -> None:
    """One grammar cannot be compiled, one exceeds its work, and one ends before min_tokens."""
    wide = [
        {"type": "object", "properties": {f"k{j}": {"type": "string"} for j in range(i, i + 30)}}
        for i in range(200)
    ]
    bad = [Task({"$ref": "#"}), Task({"anyOf": wide})]
    tasks = [*bad, *random_tasks(10, seed=4)]
    outcome = run_tasks(SingleCommunicator(), str(tmp_path), path, Run(), tasks)
    assert outcome.ends[:2] == [FinishReason.ERROR] * 2
    assert "no token is left" in outcome.errors[0]
    assert "too complex" in outcome.errors[1]
    assert check_answers(path, Run(), tasks, outcome) >= 8
    totals = outcome.totals
    assert totals.constraints.failures == {"grammar_dead_end": 1, "grammar_too_complex": 1}
    assert totals.nonfinite_rows_total == 0
    run = Run(params={"min_tokens": 50})
    outcome = run_tasks(SingleCommunicator(), str(tmp_path), path, run, [Task("abc")])
    assert outcome.ends == [FinishReason.ERROR]
    assert "min_tokens=50" in outcome.errors[0]


def test_forced_tokens_are_the_tokens_that_would_be_sampled(path: str, tmp_path: Path) -> None:
    tasks = random_tasks(16, seed=6)
    single = SingleCommunicator()
    forced = run_tasks(single, str(tmp_path), path, Run(), tasks)
    sampled = run_tasks(single, str(tmp_path), path, Run(forced=False), tasks)
    assert forced.totals.constraints.forced_tokens > 15
    assert sampled.totals.constraints.forced_tokens == 0
    assert forced.totals.step_id <= sampled.totals.step_id
    assert forced.tokens == sampled.tokens


def test_log_probabilities_are_those_of_the_raw_logits(path: str) -> None:
    """The mask changes neither them nor, compared with a request without them, the tokens."""
    grammar = Task("[0-9]{12}").grammar()
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20, grammar=grammar)
    with LLM(path, device="cpu") as llm:
        plain = llm.generate("hello", params, progress=False)
        asked = msgspec.structs.replace(params, logprobs=20)
        found = llm.generate("hello", asked, progress=False)
    assert isinstance(plain, Completion)
    assert isinstance(found, Completion)
    assert found.token_ids == plain.token_ids
    assert found.finish_reason is FinishReason.STOP
    assert len(found.logprobs) == len(found.token_ids)
    likely = {top.token_id for each in found.logprobs for top in each.top}
    assert not likely <= set(found.token_ids), "the most likely tokens are no digits"
    chosen = [math.exp(each.logprob) for each in found.logprobs]
    assert max(chosen) < 0.05, "a digit is one of over a thousand ids"
