"""The demo model gives the same answers with and without drafts."""

from dataclasses import replace
from typing import Any

import pytest

from minisgl import LLM, SamplingParams
from minisgl.core import InvalidRequest
from minisgl.drafts import PricedLengths

CODE = "def add(a, b):\n    return a + b\n" * 6
PROMPTS = [
    CODE,
    "one two three one two three one two",
    "Repeat: a b c d e f. a b c d",
    CODE + "def",
    "x = 1\n" * 9,
    *["one two three one two three one two "] * 3,
]
WORDS = "((one|two|three) )+"
ASKED: list[SamplingParams] = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=3, max_tokens=33),
    SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=(101,)),
    SamplingParams(temperature=0.5, seed=9, max_tokens=12, presence_penalty=0.5, ignore_eos=True),
    SamplingParams(temperature=0.5, seed=9, max_tokens=12, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=7, max_tokens=31, regex=WORDS, logprobs=2),
    SamplingParams(temperature=0.7, seed=8, max_tokens=31, regex=WORDS, presence_penalty=0.5),
    SamplingParams(temperature=0.7, seed=9, max_tokens=31, regex=WORDS, min_tokens=20),
]


def answers(**settings: Any) -> tuple[list[Any], Any]:
    with LLM(device="cpu", num_pages=256, max_running_reqs=10, max_seq_len=512, **settings) as llm:
        return llm.generate(PROMPTS, ASKED, stop=("zz", "+ b\n\n", "two two")), llm.worker


def check(drafted: list[Any], plain: list[Any]) -> None:
    """The answers are equal, except for the last bits of log-probabilities.

    The cached tokens of equal prompts depend on the time that their grammars take to compile.
    """
    for one, other in zip(drafted, plain, strict=True):
        same = {"logprobs": [], "cached_tokens": 0}
        assert replace(one, **same) == replace(other, **same)
        found = [(each.token_id, [top.token_id for top in each.top]) for each in one.logprobs]
        expected = [(each.token_id, [top.token_id for top in each.top]) for each in other.logprobs]
        assert found == expected
        chances = [each.logprob for each in one.logprobs]
        assert chances == pytest.approx([each.logprob for each in other.logprobs], abs=1e-4)


def test_drafts_change_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step forwards the longest drafts and ignores their price."""
    monkeypatch.setattr(PricedLengths, "best", lambda self, step: min(7, step.limit))
    plain, _ = answers()
    drafted, worker = answers(speculative="ngram")
    check(drafted, plain)
    totals = worker.scheduler.totals.drafts
    assert 0 < sum(totals.accepted) < sum(totals.drafted)


def test_predictions_change_no_answer_and_save_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PricedLengths, "best", lambda self, step: min(7, step.limit))
    asked = SamplingParams(temperature=0.7, seed=3, max_tokens=40, ignore_eos=True)
    prompts = ["The sea", [40, 41, 42]]
    steps = []
    with LLM(device="cpu", num_pages=128, max_seq_len=256, speculative="ngram") as llm:
        expected = llm.generate(prompts, asked)
        ids = [each.token_ids for each in expected]
        for prediction in (["", []], ids, [ids[1], "other"], [ids[0] * 9, ids[1][:20]]):
            before = llm.worker.scheduler.totals.phases["decode"].eager_steps
            assert llm.generate(prompts, asked, prediction=prediction) == expected
            steps.append(llm.worker.scheduler.totals.phases["decode"].eager_steps - before)
        chat = [{"role": "user", "content": "Hello"}]
        text = llm.chat(chat, asked).text
        assert llm.chat(chat, asked, prediction=text).text == text
        for wrong in (3, ["a"], ["a", "b", "c"], [3, 4], [3, None]):
            with pytest.raises(InvalidRequest, match="prediction must be") as error:
                llm.generate(prompts, asked, prediction=wrong)
            assert error.value.param == "prediction"
    assert steps[1] <= 8 < 20 < steps[0]
