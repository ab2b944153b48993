"""With a step-time target: the number of prompt tokens in a step with decoding requests."""

import pytest

from minisgl.core import StepCost, StepWork
from minisgl.scheduler.budget import MAX_STEP_S
from tests.unit.scheduler.fake_engine import FakeEngine
from tests.unit.scheduler.harness import Harness
from tests.unit.scheduler.test_scheduler import config, prompt_of


def linear_cost(base_s: float, pair_s: float = 0.0) -> StepCost:
    """A step takes base_s, 0.1 ms for each token, and pair_s for each (query, key) pair."""
    ends = (base_s + 0.0001, base_s + 0.1)
    return StepCost(tokens=(1, 1000), seconds=ends, per_decode_key_s=0.0, per_prefill_pair_s=pair_s)


def test_the_step_time_target_cuts_chunks_only_while_streams_decode() -> None:
    engine = FakeEngine(512, 4, max_seq_len=1024)
    harness = Harness(engine, config(prefill_budget_tokens=512, target_step_ms=20.0))
    cost = linear_cost(base_s=0.005)
    harness.scheduler.view.cost = cost
    harness.add(prompt_of(600, 3), max_tokens=8, ignore_eos=True)
    harness.run()
    assert [len(b.chunk_ids) for b in engine.batches[:2]] == [512, 88]
    engine.batches.clear()
    harness.add(prompt_of(4, 9), max_tokens=60, ignore_eos=True)
    harness.step()
    harness.add(prompt_of(600, 5), max_tokens=2, ignore_eos=True)
    harness.run()
    chunks = [len(b.chunk_ids) for b in engine.batches if b.num_decode and len(b.chunk_ids)]
    assert chunks[:4] == [127] * 4, "20 ms allow 150 tokens; 128 fill a tile"


def mixed_steps(
    base_s: float, waiting: int, pair_s: float = 0.0, max_slowdown: float = 2.25
) -> list[int]:
    """Return the prompt tokens of mixed steps in which a token takes 0.1 ms."""
    return steps_of_cost(linear_cost(base_s, pair_s), waiting, max_slowdown)


def steps_of_cost(
    cost: StepCost, waiting: int, max_slowdown: float = 2.25, priority: int = 0
) -> list[int]:
    """Return the prompt tokens of the mixed steps of 4 streams and 1 + waiting prompts of 600.

    The target is 20 ms, and one prompt is admitted at a time. priority: of the prompts.
    """
    engine = FakeEngine(2048, 4, max_running_reqs=5, max_seq_len=1024)
    limits = {"target_step_ms": 20.0, "max_slowdown": max_slowdown}
    harness = Harness(engine, config(prefill_budget_tokens=512, **limits))
    harness.scheduler.view.cost = cost
    for stream in range(4):
        harness.add(prompt_of(4, stream), max_tokens=200, ignore_eos=True)
    harness.step()
    engine.batches.clear()
    for index in range(1 + waiting):
        harness.add(prompt_of(600, 10 + index), max_tokens=1, ignore_eos=True, priority=priority)
    harness.run()
    return [len(b.chunk_ids) for b in engine.batches if b.num_decode and len(b.chunk_ids)]


def test_the_limit_grows_with_the_decode_only_step() -> None:
    # A decode-only step takes 29.6 ms + 4 x 0.1 ms = 30 ms, so the limit is 67 ms: 375 tokens.
    assert mixed_steps(0.0296, waiting=0) == [316, 284], "316 + 4 fill tiles of 64"


def test_a_lower_slowdown_bounds_steps_that_take_longer_than_the_target() -> None:
    # A decode-only step takes 30 ms, so the limit is 39 ms: 94 tokens.
    assert mixed_steps(0.0296, waiting=0, max_slowdown=1.3)[:2] == [60, 60], "60 + 4 fill a tile"


def test_the_limit_grows_with_a_long_queue() -> None:
    # 8 x 600 waiting tokens take 0.48 s. The limit is 1.9 times 20 ms, which allows 330 tokens.
    chunks = mixed_steps(0.005, waiting=7)
    assert chunks[0] == 316, "316 + 4 fill tiles of 64"
    assert chunks[-3:-1] == [124, 124], "at the end no request waits"
    # A queue of 1.3 s: the limit is four times 20 ms. 380 tokens and their pairs take 58 ms; 508
    # tokens would take 82 ms.
    assert mixed_steps(0.005, waiting=20, pair_s=2e-7)[0] == 380


def experts_cost(pair_s: float = 0.0) -> StepCost:
    """64 tokens take 20.5 ms, a little above the target of 20, and 1,000 take 21."""
    return StepCost(
        tokens=(1, 64, 1000),
        seconds=(0.003, 0.0205, 0.021),
        per_decode_key_s=0.0,
        per_prefill_pair_s=pair_s,
    )


def test_a_chunk_is_not_small_where_the_next_tokens_cost_almost_nothing() -> None:
    """Regression: with experts, a target of 16 ms cut chunks to 52 tokens; 1,024 take 16.4 ms."""
    chunks = steps_of_cost(experts_cost(), waiting=0)
    assert chunks[:2] == [252, 252], "half of the rate of 512 tokens"


def test_a_stretched_step_takes_at_most_twice_the_limit() -> None:
    """Regression: each larger chunk added its pairs with a long context to the step."""
    cost = experts_cost(pair_s=3e-7)
    chunks = steps_of_cost(cost, waiting=0)
    assert chunks[0] > 60, "the first chunk has few pairs"
    for index, chunk in enumerate(chunks):
        pairs = chunk * (sum(chunks[:index]) + chunk // 2)
        assert cost.predict_s(StepWork(4 + chunk, 0, pairs)) <= 2 * 0.02


def test_prompts_of_a_later_priority_stretch_no_step() -> None:
    chunks = steps_of_cost(experts_cost(), waiting=0, priority=1)
    assert chunks[0] == 60, "the smallest step size above 32 tokens"


def test_further_choices_give_way_to_another_client() -> None:
    """A token takes 1 ms, and a step 5 ms more. A call of 28 choices has prompts of 30 tokens.

    Regression: a step had as many of their tokens as 2.25 decode-only steps, and another client
    that arrived in it waited for its end, and for the next one.
    """
    engine = FakeEngine(1024, 4, max_running_reqs=32, max_seq_len=128)
    harness = Harness(engine, config(target_step_ms=16.0))
    harness.scheduler.view.cost = StepCost(
        tokens=(1, 1000), seconds=(0.006, 1.005), per_decode_key_s=0.0, per_prefill_pair_s=0.0
    )
    harness.add([7], client="b", max_tokens=1)
    harness.run()
    engine.batches.clear()
    harness.add(prompt_of(30), client="a", call=1, count=28, max_tokens=60, ignore_eos=True)
    while len(harness.scheduler.view.decode_rows) < 10:
        harness.step()
    chunks = [len(batch.chunk_ids) for batch in engine.batches if batch.num_decode]
    assert max(chunks) <= 32
    other = harness.add(prompt_of(8, 5), client="b", max_tokens=2, ignore_eos=True)
    before = len(engine.batches)
    while not harness.answers[other].tokens:
        harness.step()
    own, next_one = engine.batches[before : before + 2]
    assert own.num_decode == 1, "one choice of the call decodes beside it"
    assert len(own.chunk_ids) == 8, "the step has no other prompt"
    assert next_one.num_decode > 9
    assert len(next_one.chunk_ids) > 8, "the next step goes on with the choices"


def test_prefill_goes_on_even_when_every_step_exceeds_the_limit() -> None:
    assert mixed_steps(0.005, waiting=0, pair_s=1.0) == [60] * 10, (
        "the smallest step size above 32 tokens"
    )


@pytest.mark.parametrize("target_step_ms", [20.0, None])
def test_no_chunk_of_a_lone_prompt_takes_more_than_two_seconds(
    target_step_ms: float | None,
) -> None:
    """Regression: on a CPU, a chunk of 8,192 tokens took more than --step-timeout."""
    engine = FakeEngine(1024, 4, max_seq_len=4096)
    harness = Harness(engine, config(prefill_budget_tokens=2048, target_step_ms=target_step_ms))
    cost = linear_cost(base_s=0.005, pair_s=5e-6)
    harness.scheduler.view.cost = cost
    harness.add(prompt_of(3000, 3), max_tokens=2, ignore_eos=True)
    harness.run()
    chunks = [len(b.chunk_ids) for b in engine.batches if len(b.chunk_ids)]
    assert sum(chunks) == 3000
    for index, chunk in enumerate(chunks):
        start = sum(chunks[:index])
        assert cost.predict_s(StepWork(chunk, 0, chunk * (start + chunk // 2))) <= MAX_STEP_S
    assert chunks[0] == 768, "the largest size within the limit"
    assert chunks[0] > chunks[-2]


@pytest.mark.parametrize("cache_type", ["radix", "naive"])
def test_a_shared_prefix_counts_once_in_the_queue(cache_type: str) -> None:
    engine = FakeEngine(256, 4, max_running_reqs=1, max_seq_len=256)
    harness = Harness(engine, config(cache_type=cache_type))
    harness.add(prompt_of(8), max_tokens=8, ignore_eos=True)
    harness.step()
    first = prompt_of(200, 1)
    for prompt in (first, first, [*first[:162], 5], [*first[:60], 5]):
        harness.add(prompt)
    harness.add(first, cache_salt="other")
    harness.add(first, prompt_logprobs=0)
    harness.step()
    counted = [req.uncached_tokens for req in harness.scheduler.view.waiting]
    shared = 196 if cache_type == "radix" else 0
    assert counted == [200, 200 - shared, 163 - min(shared, 160), 61, 200, 200]


def test_prompts_too_short_to_share_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each new request was compared with 64 others, which took 144 us."""

    def fail(*_: object) -> int:
        raise AssertionError("a prompt of 20 tokens never waits for another")

    monkeypatch.setattr("minisgl.scheduler.view.common_prefix", fail)
    harness = Harness(FakeEngine(64, 4), config())
    uids = [harness.add(prompt_of(20, i % 2), max_tokens=2, ignore_eos=True) for i in range(12)]
    harness.run()
    assert [len(harness.answers[uid].tokens) for uid in uids] == [2] * 12


def test_cached_keys_count_in_the_time_of_a_chunk() -> None:
    """Regression: 600 cached tokens were left out, so a chunk of 127 tokens took 34 ms."""
    harness = Harness(
        FakeEngine(512, 4, max_seq_len=1024),
        config(prefill_budget_tokens=512, target_step_ms=20.0),
    )
    harness.scheduler.view.cost = linear_cost(base_s=0.005, pair_s=2e-7)
    harness.add(prompt_of(600, 3), max_tokens=1)
    harness.run()
    harness.add(prompt_of(4, 9), max_tokens=60, ignore_eos=True)
    harness.step()
    harness.engine.batches.clear()
    harness.add(prompt_of(600, 3) + prompt_of(300, 7), max_tokens=1)
    harness.run()
    chunks = [len(batch.chunk_ids) for batch in harness.engine.batches if len(batch.chunk_ids)]
    assert chunks == [63, 63, 63, 63, 48]


def test_a_plan_computes_no_budget_while_no_request_can_get_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: with all rows decoding, each plan predicted some ten step times."""
    harness = Harness(FakeEngine(64, 4, max_running_reqs=2), config(target_step_ms=20.0))
    for client in ("a", "b", "a", "b"):
        harness.add(prompt_of(8), client=client, max_tokens=20, ignore_eos=True)
    while len(harness.scheduler.view.decode_rows) < 2:
        harness.step()

    def fail(*_: object) -> int:
        raise AssertionError("no row is free, and no prompt is under way")

    with monkeypatch.context() as patched:
        patched.setattr("minisgl.scheduler.filling.step_budget", fail)
        for _ in range(4):
            harness.step()
        assert len(harness.scheduler.view.waiting) == 2
    harness.run()
    assert [len(answer.tokens) for answer in harness.answers.values()] == [20] * 4
