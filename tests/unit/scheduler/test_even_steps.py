"""Without a step-time target: prompts before decoding, and prompts in the decode steps."""

import hypothesis.strategies as st
from hypothesis import given, settings

from minisgl.core import FREE_STEPS, SchedulerConfig, StepCost
from tests.examples import examples
from tests.unit.scheduler.fake_engine import FakeEngine, expected_output
from tests.unit.scheduler.harness import Harness
from tests.unit.scheduler.offline import COST, Size, run_offline, size_of
from tests.unit.scheduler.test_scheduler import prompt_of
from tests.unit.scheduler.test_timed_steps import linear_cost

BUDGET = 2048


def start(
    requests: list[tuple[int, int]],
    rows: int = 8,
    num_pages: int = 8192,
    budget: int = BUDGET,
    cost: StepCost = COST,
    cache_type: str = "radix",
) -> Harness:
    """Queue requests of (prompt tokens, output tokens) with different prompts."""
    engine = FakeEngine(num_pages, 16, max_running_reqs=rows, max_seq_len=8192)
    config = SchedulerConfig(
        prefill_budget_tokens=budget, target_step_ms=None, cache_type=cache_type
    )
    harness = Harness(engine, config)
    harness.scheduler.view.cost = cost
    for index, (length, most) in enumerate(requests):
        harness.add(prompt_of(length, index), max_tokens=most, ignore_eos=True)
    return harness


def steps_of(*args: object, **kwargs: object) -> list[Size]:
    harness = start(*args, **kwargs)  # type: ignore[arg-type]
    harness.run()
    return [size_of(batch) for batch in harness.engine.batches]


def chunks_of(*args: object, **kwargs: object) -> list[int]:
    """Return the prompt tokens of the steps that have any."""
    return [size.prompt for size in steps_of(*args, **kwargs) if size.prompt]


def test_prompts_with_short_outputs_are_computed_next_to_decoding() -> None:
    steps = steps_of([(100, 60), *[(2000, 5)] * 4])
    assert steps[0] == (0, 2048), "no request decodes: the whole budget"
    mixed = [size for size in steps[1:] if size.prompt]
    assert len(mixed) == 12
    assert all(sum(size) == 512 for size in mixed[:-1])
    assert len(steps) == 60, "the longest request decodes in every step"


def test_even_steps_are_as_large_as_the_decode_steps_left_require() -> None:
    """18,052 tokens are left for the 18 steps until the last requests start: 1,003 each."""
    steps = steps_of([(100, 20), *[(2000, 2)] * 10], rows=16)
    mixed = [size for size in steps[1:] if size.prompt]
    assert {sum(size) for size in mixed[:-2]} == {1024}
    assert sum(size.prompt for size in mixed) == 18_052
    assert len(steps) == 20


def test_a_request_that_is_due_does_not_wait_for_later_ones() -> None:
    """The due request has 3,962 tokens left and five steps: 793 tokens each, rounded to tiles."""
    steps = steps_of([(10, 100), (6000, 95), *[(3000, 5)] * 2])
    assert [size.prompt for size in steps[:6]] == [2048, 895, *[767] * 4]
    assert sum(steps[6]) == 512, "the other requests are not urgent: the smallest even step"
    assert len(steps) == 100


def test_prompts_before_a_long_request_are_computed_in_time() -> None:
    """The last prompt is short, but must be complete three steps after the first prompt."""
    steps = steps_of([(10, 40), *[(1500, 10)] * 3, (20, 37)])
    assert steps[:4] == [(0, 2048), (2, 894), (2, 894), (3, 694)]
    assert len(steps) == 40


def test_the_longest_request_may_still_wait() -> None:
    """The decoding request is almost complete. The next request has the most output tokens."""
    assert steps_of([(2048, 3), (40, 100), *[(3000, 2)] * 2])[:3] == [(0, 2048), (1, 511), (2, 510)]


def test_prompts_come_first_when_all_outputs_have_the_same_limit() -> None:
    chunks = chunks_of([(3000, 30)] * 4)
    assert chunks == [2048] * 5 + [1760]


def test_prompts_come_first_while_more_requests_wait_than_rows_are_free() -> None:
    chunks = chunks_of([(100, 60), *[(2000, 2)] * 5], rows=2)
    assert chunks[:5] == [2048, 52, 2000, 2000, 2000]
    assert chunks[5:] == [511, 511, 511, 467], "the last request has a free row"


def test_prompts_come_first_when_mixed_steps_cost_more() -> None:
    """Small model: 511 tokens take 2.8 ms with a decode token, 1.9 ms within a step of 2,048."""
    cost = StepCost(
        tokens=(1, 64, 512, 2048),
        seconds=(0.001, 0.0011, 0.0038, 0.0076),
        per_decode_key_s=0.0,
        per_prefill_pair_s=0.0,
    )
    assert chunks_of([(100, 60), *[(2000, 5)] * 4], cost=cost) == [2048] * 3 + [1956]


def test_prompts_come_first_if_steps_take_no_time() -> None:
    assert chunks_of([(100, 60), *[(2000, 5)] * 4], cost=FREE_STEPS) == [2048] * 3 + [1956]


def test_prompts_come_first_while_no_request_decodes() -> None:
    assert steps_of([(5000, 2)]) == [(0, 2048), (0, 2048), (0, 904), (1, 0)]
    ended_at_once = [(2048, 1), (3000, 40), (3000, 2)]
    assert steps_of(ended_at_once)[:3] == [(0, 2048), (0, 2048), (0, 2048)]


def test_even_steps_stay_within_a_small_budget() -> None:
    steps = steps_of([(40, 80), *[(300, 5)] * 3], budget=64)
    assert [size.prompt for size in steps[:15]] == [64] * 14 + [44]


def test_prefill_goes_on_with_more_streams_than_tokens_in_an_even_step() -> None:
    """A chunk has at least half an even step, rounded up to a step size: 600 + 296 tokens."""
    cost = linear_cost(base_s=0.005)
    steps = steps_of([*[(3, 40)] * 600, (900, 5)], rows=640, cost=cost)
    assert steps[:4] == [(0, 2048), (600, 296), (600, 296), (600, 60)]
    assert len(steps) == 40


def test_a_cached_prefix_leaves_less_to_compute() -> None:
    harness = start([(1990, 1)])
    harness.run()
    engine = harness.engine
    engine.batches.clear()
    computed = harness.scheduler.totals.prefill_tokens_total
    stream = harness.add(prompt_of(100, 1), max_tokens=60, ignore_eos=True)
    harness.step()
    shared = [prompt_of(1990, 0) + prompt_of(800, 10 + i) for i in range(3)]
    uids = [harness.add(prompt, max_tokens=4, ignore_eos=True) for prompt in shared]
    harness.run()
    assert [harness.answers[uid].cached_tokens for uid in uids] == [1984] * 3
    assert harness.scheduler.totals.prefill_tokens_total - computed == 100 + 3 * 806
    mixed = [size for size in map(size_of, engine.batches) if size.decode and size.prompt]
    assert all(sum(size) == 512 for size in mixed[:-1])
    assert len(engine.batches) == 60
    assert len(harness.answers[stream].tokens) == 60
    for uid, prompt in zip(uids, shared, strict=True):
        assert harness.answers[uid].tokens == expected_output(prompt, 4, ignore_eos=True)


def test_a_shared_prefix_counts_once_in_even_steps() -> None:
    """If the prefix counted three times, the steps would have up to 896 tokens."""
    harness = start([])
    harness.add(prompt_of(100, 1), max_tokens=16, ignore_eos=True)
    harness.step()
    for i in range(3):
        harness.add(prompt_of(1990, 0) + prompt_of(800, 10 + i), max_tokens=4, ignore_eos=True)
    harness.run()
    mixed = [size for size in map(size_of, harness.engine.batches) if size.decode and size.prompt]
    assert sum(size.prompt for size in mixed) == 1990 + 3 * 800 + 2 * 6
    assert [sum(size) for size in mixed] == [*[512] * 5, 236, *[512] * 3, 84]


def test_a_preempted_request_counts_the_tokens_that_it_computes_again() -> None:
    """The outputs of the preempted request are part of its prompt now.

    The request waits for the pages of the second request. Then its 625 tokens are computed in two
    steps, next to the first request.
    """
    requests = [(600, 300), (600, 40), (600, 80)]
    harness = start(requests, rows=4, num_pages=118, cache_type="naive")
    while not any(req.admitted for req in harness.scheduler.view.waiting):
        harness.step()
        assert not harness.scheduler.idle
    harness.engine.batches.clear()
    harness.run()
    assert harness.scheduler.totals.preemptions_total == 1
    assert [s for s in map(size_of, harness.engine.batches) if s.prompt] == [(1, 511), (1, 114)]
    assert_plain_outputs(harness, requests)


def assert_plain_outputs(harness: Harness, requests: list[tuple[int, int]]) -> None:
    for uid, (length, most) in enumerate(requests, start=1):
        plain = expected_output(prompt_of(length, uid - 1), most, ignore_eos=True)
        assert harness.answers[uid].tokens == plain


@settings(max_examples=examples(25))
@given(
    requests=st.lists(st.tuples(st.integers(1, 900), st.integers(1, 24)), min_size=1, max_size=8),
    rows=st.integers(1, 8),
    spare=st.integers(0, 120),
    budget=st.sampled_from([64, 600, 2048]),
)
def test_every_answer_equals_the_plain_computation_with_few_pages(
    requests: list[tuple[int, int]], rows: int, spare: int, budget: int
) -> None:
    """In any order of arrival, and with preempted requests in the queue."""
    least = max(-(-sum(request) // 16) for request in requests)
    harness = start(requests, rows=rows, num_pages=least + spare, budget=budget)
    harness.run()
    assert all(size_of(batch).prompt <= budget for batch in harness.engine.batches)
    assert_plain_outputs(harness, requests)


LENGTHS = st.integers(1, 3000) | st.integers(1, 50)
OUTPUTS = st.integers(1, 200) | st.integers(1, 30) | st.just(100)


@settings(max_examples=examples(60))
@given(
    requests=st.lists(st.tuples(LENGTHS, OUTPUTS), min_size=1, max_size=40),
    rows=st.sampled_from([3, 64]),
    budget=st.sampled_from([256, 600, 2048, 8192]),
)
def test_even_steps_end_no_later_than_prompts_first(
    requests: list[tuple[int, int]], rows: int, budget: int
) -> None:
    """Even steps need neither more steps nor more time than computing prompts first.

    Steps: the longest request has L - 1 steps left. The prompt of a request with o outputs is
    computed within L - o steps, and it has o - 1 further steps: L - 1 in all. When that takes more
    than the budget, the steps are the same as with prompts first.

    Time: both orders take the same number of steps, tokens and attention; only the step sizes
    differ. Each chunk costs less next to decode tokens than its share of a whole budget. The
    tolerance of a thousandth is for costs that are not convex, where 32 tokens cost no more than
    16. A search over 1,200 examples found a loss of 0.018 % at most.
    """
    first = run_offline(requests, even=False, rows=rows, budget=budget)
    even = run_offline(requests, even=True, rows=rows, budget=budget)
    assert even.generated == first.generated == sorted((o for _, o in requests), reverse=True)
    assert max(size.prompt for size in even.sizes) <= budget
    assert len(even.sizes) <= len(first.sizes)
    assert even.seconds <= 1.001 * first.seconds
