"""Requests of a model with window layers: hits of shared prefixes, and few window pages."""

import numpy as np
import pytest

from minisgl.core import SchedulerConfig
from minisgl.core.batch import WindowLayers
from tests.unit.scheduler.drafts import DRAFTERS, ChangingDrafts
from tests.unit.scheduler.fake_engine import FakeEngine, expected_output
from tests.unit.scheduler.harness import Harness

PAGE = 2
WINDOW = 8
RESERVE = WindowLayers(WINDOW, 0).reserve(PAGE)
SYSTEM = [1 + (7 * i) % 61 for i in range(40)]


def new_harness(window_pages: int, budget: int = 64) -> Harness:
    engine = FakeEngine(200, PAGE, 8, 128, window=WindowLayers(WINDOW, window_pages))
    return Harness(engine, SchedulerConfig(prefill_budget_tokens=budget, target_step_ms=None))


def cached_tokens(harness: Harness, prompt: list[int]) -> int:
    """Run one request to its end; return the prompt tokens that were cached."""
    uid = harness.add(prompt, max_tokens=4, ignore_eos=True)
    harness.run()
    assert harness.answers[uid].tokens == expected_output(prompt, 4, ignore_eos=True)
    return harness.answers[uid].cached_tokens


def test_the_third_request_with_a_shared_prefix_finds_its_window() -> None:
    """The second one computes the prefix again and leaves the window at the end of it."""
    harness = new_harness(100, budget=8)
    found = [cached_tokens(harness, [*SYSTEM, *[own] * 21]) for own in (50, 51, 52)]
    assert found == [0, 0, len(SYSTEM)]


def test_an_equal_prompt_and_the_next_turn_of_a_chat_are_hits() -> None:
    harness = new_harness(100)
    assert cached_tokens(harness, SYSTEM) == 0
    assert cached_tokens(harness, SYSTEM) == len(SYSTEM) - PAGE, "one token is computed"
    answer = expected_output(SYSTEM, 4, ignore_eos=True)
    assert cached_tokens(harness, [*SYSTEM, *answer, 9, 9, 9]) == len(SYSTEM) + PAGE


def test_a_hit_needs_its_window_only() -> None:
    """The windows of other prompts evict the window of the first one, and its pages stay."""
    harness = new_harness(2 * RESERVE)
    cached_tokens(harness, SYSTEM)
    for own in (50, 51, 52):
        cached_tokens(harness, [own] * 20)
    cache = harness.scheduler.memory.tree
    assert cache.match(np.array(SYSTEM, dtype=np.int32)).known_pages == len(SYSTEM) // PAGE
    assert cached_tokens(harness, SYSTEM) == 0


def test_reserves_limit_the_requests_that_run_together() -> None:
    harness = new_harness(2 * RESERVE)
    prompts = [[own] * 30 for own in range(40, 46)]
    uids = [harness.add(prompt, max_tokens=12, ignore_eos=True) for prompt in prompts]
    harness.run()
    assert max(len(batch.rows) for batch in harness.engine.batches) == 2
    for uid, prompt in zip(uids, prompts, strict=True):
        assert harness.answers[uid].tokens == expected_output(prompt, 12, ignore_eos=True)
    assert harness.scheduler.totals.preemptions_total == 0
    used, evictable, free = harness.scheduler.stats().kind_pages["window"]
    assert (used, evictable + free) == (0, 2 * RESERVE)


def test_a_long_prompt_runs_with_the_smallest_pool() -> None:
    harness = new_harness(RESERVE)
    cached_tokens(harness, [3, 4, 5] * 30)
    assert max(len(batch.chunk_ids) for batch in harness.engine.batches) <= RESERVE * PAGE


def test_the_newest_request_is_preempted_although_it_waits_for_a_window_page() -> None:
    """The newest request gets no window page for its second token.

    The pages behind the window are free only after the step in flight. In the same plan, the two
    older requests find too few pages of the other pool.
    """
    engine = FakeEngine(42, 1, 3, 48, window=WindowLayers(5, 26))
    harness = Harness(engine, SchedulerConfig(target_step_ms=None))
    for length, max_tokens in ((17, 16), (6, 20), (10, 6)):
        harness.add([length] * length, max_tokens=max_tokens, ignore_eos=True)
    while not harness.scheduler.totals.preemptions_total:
        harness.step()
    (preempted,) = harness.scheduler.view.waiting
    assert preempted.arrival_index == 3
    harness.run()


@pytest.mark.parametrize("drafter", sorted(DRAFTERS))
def test_a_window_moves_with_the_accepted_drafts_only(drafter: str) -> None:
    """The steps in flight count all drafts as accepted. Requests reuse the dropped pages."""
    layers = WindowLayers(WINDOW, 4 * RESERVE)
    engine = FakeEngine(200, PAGE, 4, 128, drafter=DRAFTERS[drafter], window=layers)
    config = SchedulerConfig(target_step_ms=None)
    harness = Harness(engine, config, drafts=ChangingDrafts(7, changing=False))
    prompts = [[own] * 30 for own in range(40, 48)]
    uids = [harness.add(prompt, max_tokens=40, ignore_eos=True) for prompt in prompts]
    harness.run()
    assert max(batch.width for batch in engine.batches) == 8
    for uid, prompt in zip(uids, prompts, strict=True):
        assert harness.answers[uid].tokens == expected_output(prompt, 40, ignore_eos=True)
    used, evictable, free = harness.scheduler.stats().kind_pages["window"]
    assert (used, evictable + free) == (0, 4 * RESERVE)


def test_drafts_take_no_page_of_a_reserve() -> None:
    """Two requests fill the pool with their reserves, and have drafts where pages are left."""
    layers = WindowLayers(WINDOW, 2 * RESERVE)
    engine = FakeEngine(200, PAGE, 8, 128, drafter=DRAFTERS["half right"], window=layers)
    config = SchedulerConfig(target_step_ms=None)
    harness = Harness(engine, config, drafts=ChangingDrafts(7, changing=False))
    prompts = [[own] * 30 for own in range(40, 44)]
    uids = [harness.add(prompt, max_tokens=20, ignore_eos=True) for prompt in prompts]
    harness.run()
    for uid, prompt in zip(uids, prompts, strict=True):
        assert harness.answers[uid].tokens == expected_output(prompt, 20, ignore_eos=True)
    assert max(batch.num_decode for batch in engine.batches) == 2
    assert max(batch.width for batch in engine.batches) > 1
    assert harness.scheduler.totals.preemptions_total == 0
