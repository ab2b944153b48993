"""Decode requests that forward draft tokens and get several tokens from one step."""

import pytest

from minisgl.core import FinishReason, SchedulerConfig, StepCost
from minisgl.core.batch import DecodeLoad, DraftCounts
from tests.unit.scheduler.drafts import DRAFTERS, PREDICTIONS, ChangingDrafts
from tests.unit.scheduler.fake_engine import (
    VOCAB,
    FakeEngine,
    expected_output,
)
from tests.unit.scheduler.harness import Harness
from tests.unit.scheduler.integrity import check_cached_slots
from tests.unit.scheduler.test_timed_steps import linear_cost

PAGE_SIZE = 4


def drafting_harness(overlap: bool = True, most: int = 3, drafter: str = "half right") -> Harness:
    """A scheduler whose decode requests forward drafts where their limit allows it."""
    engine = FakeEngine(num_pages=64, page_size=PAGE_SIZE, drafter=DRAFTERS[drafter])
    config = SchedulerConfig(target_step_ms=None, overlap=overlap)
    return Harness(engine, config, drafts=ChangingDrafts(most, changing=False))


def prompts() -> list[list[int]]:
    return [[(first + 7 * i) % (VOCAB - 1) + 1 for i in range(5 + first)] for first in range(6)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_with_drafts_are_those_of_the_plain_computation(drafter: str, overlap: bool) -> None:
    harness = drafting_harness(overlap, 3, drafter)
    uids = [harness.add(prompt, max_tokens=21, ignore_eos=True) for prompt in prompts()]
    harness.run()
    for uid, prompt in zip(uids, prompts(), strict=True):
        assert harness.answers[uid].tokens == expected_output(prompt, 21, ignore_eos=True)
        assert harness.answers[uid].finishes == [FinishReason.LENGTH]
    assert harness.scheduler.totals.output_tokens_total == 21 * len(uids)
    drafts = harness.scheduler.view.lengths
    assert drafts.drafted > 60
    assert (drafts.agreed > 0) == (drafter != "wrong")
    assert (drafts.agreed == drafts.drafted) == (drafter == "right")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", PREDICTIONS)
def test_predictions_change_no_token(kind: str, overlap: bool) -> None:
    """A step of four tokens takes up to three from the prediction. No other draft is right.

    The first decode step finds nothing in the prediction, because it knows one token of the output.
    """
    harness = drafting_harness(overlap, 3, "wrong")
    uids = {}
    for prompt in prompts():
        output = expected_output(prompt, 21, ignore_eos=True)
        prediction = PREDICTIONS[kind](output)
        uid = harness.add(prompt, prediction=prediction, count=2, max_tokens=21, ignore_eos=True)
        uids |= {uid: (output, prediction), uid + 1: (output, prediction)}
    harness.run()
    for uid, (output, prediction) in uids.items():
        answer = harness.answers[uid]
        assert answer.tokens == output
        assert answer.predicted == len(prediction)
        if kind in ("none", "wrong"):
            assert answer.accepted == 0
        elif kind in ("right", "too long"):
            assert answer.accepted == 14, "19 tokens in five steps"
        else:
            assert 0 < answer.accepted < 14


def test_a_request_that_may_not_draft_has_no_prediction() -> None:
    harness = drafting_harness(drafter="wrong")
    prompt = prompts()[0]
    output = expected_output(prompt, 21, ignore_eos=True)
    asked = {"max_tokens": 21, "ignore_eos": True, "prediction": output}
    uids = [harness.add(prompt, **asked), harness.add(prompt, **asked, logprobs=0)]
    harness.run()
    answers = [harness.answers[uid] for uid in uids]
    assert [answer.tokens for answer in answers] == [output, output]
    assert [answer.predicted for answer in answers] == [21, 0]
    assert [answer.accepted for answer in answers] == [14, 0]


def test_a_prediction_with_an_unknown_id_is_refused() -> None:
    harness = drafting_harness()
    for prediction in ([1, VOCAB], [-1]):
        uid = harness.add(prompts()[0], prediction=prediction)
        harness.run()
        assert harness.answers[uid].finishes == [FinishReason.ERROR]
        assert "outside" in (harness.answers[uid].error or "")


def test_right_drafts_divide_the_number_of_steps() -> None:
    steps = []
    for most in (0, 3):
        harness = drafting_harness(most=most, drafter="right")
        harness.add(prompts()[0], max_tokens=21, ignore_eos=True)
        harness.run()
        steps.append(sum(batch.num_decode > 0 for batch in harness.engine.batches))
    assert steps == [20, 5]


def test_a_step_without_drafts_starts_at_exact_positions() -> None:
    """Without drafts, a step has the same tokens as that of a scheduler that never drafts."""
    batches = []
    for drafts in (None, ChangingDrafts(0)):
        engine = FakeEngine(num_pages=64, page_size=PAGE_SIZE)
        harness = Harness(engine, SchedulerConfig(target_step_ms=None), drafts=drafts)
        for prompt in prompts():
            harness.add(prompt, max_tokens=9)
        harness.run()
        batches.append([(b.rows.tolist(), b.start.tolist()) for b in engine.batches])
    assert batches[0] == batches[1]


class RecordingDrafts(ChangingDrafts):
    """Records the step times that each choice got."""

    def __init__(self) -> None:
        super().__init__(3)
        self.costs: list[StepCost | None] = []

    def choose(self, step: DecodeLoad) -> DraftCounts:
        self.costs.append(step.cost)
        return super().choose(step)


def test_the_lengths_get_no_step_times_while_a_prompt_waits_or_is_computed() -> None:
    drafts, cost = RecordingDrafts(), linear_cost(0.005)
    engine = FakeEngine(num_pages=64, page_size=PAGE_SIZE, drafter=DRAFTERS["wrong"])
    config = SchedulerConfig(target_step_ms=None, prefill_budget_tokens=8)
    harness = Harness(engine, config, drafts=drafts)
    harness.scheduler.view.cost = cost
    harness.add([1, 2, 3], max_tokens=60, ignore_eos=True)
    for _ in range(4):
        harness.step()
    harness.add([4] * 20, max_tokens=4, ignore_eos=True)
    for _ in range(4):
        harness.step()
    assert [each is cost for each in drafts.costs] == [True] * 3 + [False] * 3 + [True]


def test_a_batch_has_the_drafts_made_after_the_last_step_of_each_row() -> None:
    """A row has none after its prompt, and those of the step before it later."""
    engine = FakeEngine(num_pages=64, page_size=PAGE_SIZE, drafter=DRAFTERS["half right"])
    config = SchedulerConfig(target_step_ms=None, prefill_budget_tokens=16)
    harness = Harness(engine, config, drafts=ChangingDrafts(3, head=True))
    for prompt in prompts():
        harness.add(prompt, max_tokens=20, ignore_eos=True)
    harness.run()
    after: dict[int, int] = {}
    found = []
    for batch in engine.batches:
        decoding, chunks = batch.rows[: batch.num_decode], batch.rows[batch.num_decode :]
        assert batch.made is not None
        assert batch.made.tolist() == [after[row] for row in decoding.tolist()]
        found += batch.made.tolist()
        after |= dict.fromkeys(decoding.tolist(), batch.next_drafts) | dict.fromkeys(
            chunks.tolist(), 0
        )
    assert len({*found}) > 2


def test_a_later_prompt_reuses_the_cached_answer_of_accepted_drafts() -> None:
    harness = drafting_harness()
    first = harness.add(prompts()[0], max_tokens=20, ignore_eos=True)
    harness.run()
    longer = prompts()[0] + harness.answers[first].tokens
    second = harness.add(longer, max_tokens=8, ignore_eos=True)
    harness.run()
    assert harness.answers[second].cached_tokens >= len(longer) - PAGE_SIZE - 1
    assert harness.answers[second].tokens == expected_output(longer, 8, ignore_eos=True)


@pytest.mark.parametrize("output_tokens", range(1, 9))
def test_tokens_behind_a_stop_are_dropped(output_tokens: int) -> None:
    """The stop token is any token of its step. No key of a dropped token is cached."""
    prompt = prompts()[3]
    plain = expected_output(prompt, 20, ignore_eos=True)
    expected = plain[: plain.index(plain[output_tokens - 1]) + 1]
    harness = drafting_harness()
    stop_ids = (plain[output_tokens - 1],)
    uid = harness.add(prompt, max_tokens=20, ignore_eos=True, stop_token_ids=stop_ids)
    harness.run()
    assert harness.answers[uid].tokens == expected
    assert harness.answers[uid].finishes == [FinishReason.STOP]
    check_cached_slots(harness.scheduler.memory.tree, harness.engine)
