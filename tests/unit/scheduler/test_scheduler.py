"""Situations in which other engines failed (docs/bugs.md), and the scheduler's rules."""

import numpy as np
import pytest

from minisgl.core import FinishReason, SamplingParams, SchedulerConfig
from minisgl.message.messages import AddReq, FlushCache, Shutdown
from tests.unit.scheduler.fake_engine import EOS, VOCAB, FakeEngine, expected_output
from tests.unit.scheduler.harness import Answer, Harness


def prompt_of(length: int, first: int = 1) -> list[int]:
    return [(first + 7 * i) % (VOCAB - 1) + 1 for i in range(length)]


def prompt_that_stops_after(tokens: int) -> list[int]:
    """Return a prompt whose plain computation samples EOS as output token number `tokens`."""
    for first in range(10_000):
        prompt = [first % 63 + 1, first // 63 % 63 + 1, 5, 9]
        if len(expected_output(prompt, 20, ignore_eos=False)) == tokens:
            return prompt
    raise AssertionError("no such prompt")


def config(**changes: object) -> SchedulerConfig:
    return SchedulerConfig(**({"target_step_ms": None} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap", [True, False])
def test_equal_prompts_in_one_batch_end_up_on_the_same_pages(overlap: bool) -> None:
    """The second request went on reading its own pages after they had been freed."""
    harness = Harness(FakeEngine(16, 4), config(overlap=overlap, cache_type="radix"))
    prompt = prompt_of(13)
    a = harness.add(prompt, max_tokens=12, ignore_eos=True)
    # The shared prefix is too short to wait for, so both prompts are computed in the same step.
    b = harness.add(prompt, max_tokens=12, ignore_eos=True)
    harness.step()
    assert len(harness.engine.batches[0].rows) == 2, "both prompts must be in one step"
    late = harness.add(prompt_of(17, 3), max_tokens=4, ignore_eos=True)
    harness.run()
    for uid in (a, b):
        assert harness.answers[uid].tokens == expected_output(prompt, 12, ignore_eos=True)
    assert harness.answers[late].tokens == expected_output(prompt_of(17, 3), 4, ignore_eos=True)


def test_a_reused_row_is_not_written_by_the_step_in_flight() -> None:
    """A step in flight wrote the token of an ended request into its row's next prompt."""
    harness = Harness(FakeEngine(64, 1, max_running_reqs=1), config())
    stopping = prompt_that_stops_after(3)
    first = harness.add(stopping, max_tokens=20)
    second = harness.add(prompt_of(30), max_tokens=5, ignore_eos=True)
    harness.run()
    assert harness.answers[first].finishes == [FinishReason.STOP]
    assert harness.answers[second].tokens == expected_output(prompt_of(30), 5, ignore_eos=True)


@pytest.mark.parametrize("overlap", [True, False])
def test_nothing_comes_after_eos(overlap: bool) -> None:
    """The token of the step in flight was sent after the end of the request."""
    harness = Harness(FakeEngine(16, 4), config(overlap=overlap))
    uid = harness.add(prompt_that_stops_after(4), max_tokens=20)
    harness.run()
    answer = harness.answers[uid]
    assert answer.tokens[-1] == EOS
    assert len(answer.tokens) == 4
    assert answer.finishes == [FinishReason.STOP]


def test_max_tokens_of_one_req_leave_the_others_alone() -> None:
    """max_tokens was reduced in a SamplingParams object that several requests shared."""
    engine = FakeEngine(64, 4, max_seq_len=64)
    harness = Harness(engine, config())
    shared = SamplingParams(ignore_eos=True)
    for uid, length in ((1, 60), (2, 10)):
        ids = np.array(prompt_of(length, uid), dtype="<i4").tobytes()
        harness.inbox.messages.append(AddReq(uid=uid, token_ids=ids, sampling=shared))
        harness.answers[uid] = Answer()
    harness.run()
    assert [len(harness.answers[uid].tokens) for uid in (1, 2)] == [4, 54]


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        pytest.param([], {}, "empty", id="empty-prompt"),
        pytest.param([1], {"max_tokens": -1}, "max_tokens", id="negative-max-tokens"),
        pytest.param([1], {"max_tokens": 0}, "max_tokens", id="zero-max-tokens"),
        pytest.param([1], {"top_k": 2**40}, "top_k", id="huge-top-k"),
        pytest.param([1], {"temperature": float("nan")}, "temperature", id="nan-temperature"),
        pytest.param([1] * 256, {"max_tokens": 1}, "exceed", id="prompt-too-long"),
        pytest.param([1] * 100, {"max_tokens": 200}, "exceed", id="never-fits-context"),
        pytest.param([VOCAB], {}, "outside", id="id-beyond-logit-width"),
        pytest.param([-1], {}, "is negative", id="negative-id"),
        pytest.param([1], {"logit_bias": {VOCAB: 1.0}}, "logit_bias", id="bias-beyond-width"),
        pytest.param([1], {"stop_token_ids": (2**40,)}, "stop_token_ids", id="stop-beyond-width"),
    ],
)
def test_a_bad_req_ends_alone(prompt: list[int], sampling: dict[str, object], words: str) -> None:
    """One request ended the scheduler or was dropped without a response."""
    harness = Harness(FakeEngine(128, 4), config())
    bad = harness.add(prompt, **sampling)
    good = harness.add(prompt_of(5), max_tokens=3, ignore_eos=True)
    harness.run()
    assert harness.answers[bad].finishes == [FinishReason.ERROR]
    assert words in str(harness.answers[bad].error)
    assert harness.answers[bad].opened == 1
    assert harness.answers[good].tokens == expected_output(prompt_of(5), 3, ignore_eos=True)


def test_a_req_larger_than_the_pool_is_refused_at_once() -> None:
    harness = Harness(FakeEngine(4, 4, max_seq_len=256), config())
    uid = harness.add(prompt_of(10), max_tokens=7)
    harness.step()
    assert harness.answers[uid].finishes == [FinishReason.ERROR]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("steps_before", range(8))
def test_an_abort_is_acted_on_once_in_every_state(overlap: bool, steps_before: int) -> None:
    """Aborts with the prefill in flight, with a prefix hit, or in the step with the EOS."""
    harness = Harness(FakeEngine(24, 2, max_running_reqs=2), config(overlap=overlap))
    warm = harness.add(prompt_of(8), max_tokens=2, ignore_eos=True)
    harness.run()
    prompt = prompt_that_stops_after(4)
    aborted = harness.add(prompt_of(8) + prompt, max_tokens=20)
    other = harness.add(prompt_of(11, 4), max_tokens=9, ignore_eos=True)
    for _ in range(steps_before):
        harness.step()
    harness.abort(aborted)
    harness.abort(aborted)
    harness.run()
    harness.abort(aborted)
    harness.run()
    assert len(harness.answers[aborted].finishes) == 1
    assert harness.answers[other].tokens == expected_output(prompt_of(11, 4), 9, ignore_eos=True)
    assert harness.answers[warm].finishes == [FinishReason.LENGTH]
    pool, cache = harness.scheduler.memory.pool, harness.scheduler.memory.tree
    assert pool.num_free + cache.evictable_pages == 24


def test_admission_counts_whole_pages() -> None:
    """20 requests of 24 tokens were admitted into 8 pages of 64; then an assert failed."""
    harness = Harness(FakeEngine(8, 64, max_running_reqs=32, max_seq_len=512), config())
    uids = [harness.add(prompt_of(24, i), max_tokens=6, ignore_eos=True) for i in range(20)]
    harness.step()
    assert 1 <= len(harness.engine.batches[0].rows) <= 8
    harness.run()
    for i, uid in enumerate(uids):
        assert harness.answers[uid].tokens == expected_output(prompt_of(24, i), 6, ignore_eos=True)


def test_decode_goes_on_while_prompts_are_prefilled() -> None:
    """Prefill had precedence, so arriving prompts stopped the running streams."""
    harness = Harness(FakeEngine(128, 4), config(prefill_budget_tokens=8))
    stream = harness.add(prompt_of(4), max_tokens=40, ignore_eos=True)
    for _ in range(3):
        harness.step()
    before = len(harness.answers[stream].tokens)
    for i in range(3):
        harness.add(prompt_of(40, 10 + i), max_tokens=2, ignore_eos=True)
    for _ in range(12):
        harness.step()
    assert len(harness.answers[stream].tokens) == before + 12, "one token in every step"
    mixed = [b for b in harness.engine.batches if b.num_decode and len(b.chunk_ids)]
    assert len(mixed) >= 12
    harness.run()


def test_preempted_requests_lose_no_token() -> None:
    harness = Harness(FakeEngine(12, 2, max_running_reqs=4, max_seq_len=24), config())
    uids = [harness.add(prompt_of(5, i), max_tokens=14, ignore_eos=True) for i in range(4)]
    harness.run()
    assert harness.scheduler.totals.preemptions_total > 0
    for i, uid in enumerate(uids):
        assert harness.answers[uid].tokens == expected_output(prompt_of(5, i), 14, ignore_eos=True)
        assert harness.answers[uid].opened == 1


def test_overlap_launches_a_step_before_it_reads_the_last_result() -> None:
    harness = Harness(FakeEngine(32, 4), config(overlap=True))
    harness.add(prompt_of(5), max_tokens=10, ignore_eos=True)
    harness.run()
    assert harness.scheduler.totals.overlapped_steps_total == 9
    plain = Harness(FakeEngine(32, 4), config(overlap=False))
    plain.add(prompt_of(5), max_tokens=10, ignore_eos=True)
    plain.run()
    assert plain.scheduler.totals.overlapped_steps_total == 0


def test_equal_prompts_are_computed_once() -> None:
    engine = FakeEngine(256, 4, max_running_reqs=8)
    harness = Harness(engine, config())
    prompt = prompt_of(120)
    uids = [harness.add(prompt, max_tokens=3, ignore_eos=True) for _ in range(4)]
    harness.run()
    assert harness.scheduler.totals.prefill_tokens_total == 120 + 3 * 4
    assert [harness.answers[uid].cached_tokens for uid in uids] == [0, 116, 116, 116]


def test_a_request_with_nonfinite_logits_ends_alone_and_is_not_cached() -> None:
    engine = FakeEngine(64, 4)
    engine.break_prompts_with = 63
    harness = Harness(engine, config())
    broken = harness.add([*prompt_of(12), 63, 1], max_tokens=4)
    good = harness.add(prompt_of(9, 5), max_tokens=4, ignore_eos=True)
    harness.run()
    assert harness.answers[broken].finishes == [FinishReason.ERROR]
    assert harness.answers[broken].tokens == []
    assert "non-finite" in str(harness.answers[broken].error)
    assert len(harness.answers[good].tokens) == 4
    assert harness.scheduler.totals.nonfinite_rows_total == 1
    again = harness.add([*prompt_of(12), 62, 1], max_tokens=1)
    harness.run()
    assert harness.answers[again].cached_tokens == 0


def test_chunks_of_an_aborted_prompt_are_not_cached() -> None:
    """The logits of such chunks were never read, so non-finite KV could reach other requests."""
    engine = FakeEngine(64, 4)
    engine.break_prompts_with = 63
    harness = Harness(engine, config(prefill_budget_tokens=8))
    prompt = [63, *prompt_of(30)]
    aborted = harness.add(prompt, max_tokens=4)
    for _ in range(3):
        harness.step()
    harness.abort(aborted)
    harness.run()
    assert harness.answers[aborted].tokens == []
    engine.break_prompts_with = None
    good = harness.add(prompt, max_tokens=4, ignore_eos=True)
    harness.run()
    assert harness.answers[good].cached_tokens == 0
    assert harness.answers[good].tokens == expected_output(prompt, 4, ignore_eos=True)


def test_stop_token_ids_and_min_tokens() -> None:
    prompt = prompt_of(6)
    plain = expected_output(prompt, 12, ignore_eos=True)
    third = plain[2]
    wanted = plain.index(third) + 1
    harness = Harness(FakeEngine(32, 4), config())
    uid = harness.add(prompt, max_tokens=12, ignore_eos=True, stop_token_ids=(third,))
    late = harness.add(
        prompt, max_tokens=12, ignore_eos=True, stop_token_ids=(third,), min_tokens=wanted + 1
    )
    harness.run()
    assert harness.answers[uid].tokens == plain[:wanted]
    assert harness.answers[uid].finishes == [FinishReason.STOP]
    assert len(harness.answers[late].tokens) > wanted


def test_min_tokens_beyond_the_context_ends_at_the_context_length() -> None:
    """Regression: the position from which the request may stop overflowed int32."""
    harness = Harness(FakeEngine(32, 4, max_seq_len=24), config())
    uid = harness.add(prompt_of(6), max_tokens=None, min_tokens=2**31 - 1)
    harness.run()
    assert harness.answers[uid].finishes == [FinishReason.LENGTH]
    assert len(harness.answers[uid].tokens) == 18


def test_shutdown_ends_every_request_once() -> None:
    harness = Harness(FakeEngine(16, 4, max_running_reqs=1), config())
    uids = [harness.add(prompt_of(6, i), max_tokens=20, ignore_eos=True) for i in range(3)]
    harness.step()
    harness.inbox.messages.append(Shutdown())
    harness.run()
    assert harness.scheduler.stopping
    assert all(harness.answers[uid].finishes == [FinishReason.ABORT] for uid in uids)


def test_two_ranks_with_the_same_messages_make_the_same_plans() -> None:
    """The decode batch had the order of a set of objects."""

    def plans() -> list[tuple[list[int], list[int], list[int]]]:
        engine = FakeEngine(20, 2, max_running_reqs=4, max_seq_len=40)
        harness = Harness(engine, config(prefill_budget_tokens=9))
        for i in range(6):
            harness.add(prompt_of(5 + i, i), max_tokens=9, ignore_eos=True)
            harness.step()
        harness.abort(2)
        harness.run()
        return [
            (b.rows.tolist(), b.start.tolist(), b.page_updates.ids.tolist()) for b in engine.batches
        ]

    assert plans() == plans()


def test_only_the_same_salt_finds_a_cached_prompt_until_the_flush() -> None:
    harness = Harness(FakeEngine(num_pages=64, page_size=4))
    prompt = np.arange(3, 19, dtype="<i4").tobytes()

    def cached(salt: str) -> int:
        uid = harness.next_uid
        harness.next_uid += 1
        params = SamplingParams(max_tokens=2)
        add = AddReq(uid=uid, token_ids=prompt, sampling=params, cache_salt=salt)
        harness.inbox.messages.append(add)
        harness.answers[uid] = Answer()
        harness.run()
        return harness.answers[uid].cached_tokens

    assert [cached(""), cached("a"), cached("a"), cached("")] == [0, 0, 12, 12]
    harness.inbox.messages.append(FlushCache())
    assert [cached("a"), cached("")] == [0, 0]
