"""Decode requests that forward draft tokens and get several tokens from one step."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from minisgl.core import Batch, FinishReason, Int32Array, SchedulerConfig, StepResult
from tests.unit.scheduler.fake_engine import (
    VOCAB,
    FakeEngine,
    expected_output,
    next_token,
    slot_values,
)
from tests.unit.scheduler.harness import Harness

PAGE_SIZE = 4


class DraftingEngine(FakeEngine):
    """Writes a draft token after the last token of decode requests that forward two tokens.

    Two drafts of three are right, so that steps accept and reject.
    """

    def __init__(self) -> None:
        super().__init__(num_pages=64, page_size=PAGE_SIZE)
        self.accepted = self.rejected = 0

    def _run(self, batch: Batch) -> StepResult:
        for index in np.flatnonzero(batch.lengths[: batch.num_decode] == 2).tolist():
            row, start = int(batch.rows[index]), int(batch.start[index])
            positions = np.arange(start)
            pages = self.page_tables[0, row, positions // PAGE_SIZE]
            before = self.slots[pages * PAGE_SIZE + positions % PAGE_SIZE]
            last = slot_values(self.token_pool[row, start : start + 1], start)
            right = next_token(np.concatenate([before, last]))
            wrong = (right + 1) % VOCAB
            self.token_pool[row, start + 1] = right if (start + row) % 3 else wrong
        result = super()._run(batch)
        drafted = batch.lengths[: batch.num_decode] == 2
        counts = result.counts[: batch.num_decode][drafted]
        self.accepted += int((counts == 2).sum())
        self.rejected += int((counts == 1).sum())
        return result


def drafting_harness() -> Harness:
    """A scheduler whose decode requests forward two tokens where page and limit allow it."""
    harness = Harness(DraftingEngine(), SchedulerConfig(target_step_ms=None, overlap=False))
    planner, table = harness.scheduler.planner, harness.scheduler.table
    build: Callable[[int, Int32Array, dict[int, int]], Batch] = planner._build

    def build_with_drafts(step_id: int, rows: Int32Array, chunks: dict[int, int]) -> Batch:
        batch = build(step_id, rows, chunks)
        start, lengths = batch.start[: len(rows)], batch.lengths.copy()
        same_page = (start + 1) % PAGE_SIZE != 0
        lengths[: len(rows)] += same_page & (start + 2 < table.max_total_tokens[rows] - 1)
        return replace(batch, lengths=lengths)

    planner._build = build_with_drafts  # type: ignore[method-assign]
    return harness


def prompts() -> list[list[int]]:
    return [[(first + 7 * i) % (VOCAB - 1) + 1 for i in range(5 + first)] for first in range(6)]


def test_tokens_with_drafts_are_those_of_the_plain_computation() -> None:
    harness = drafting_harness()
    uids = [harness.add(prompt, max_tokens=21, ignore_eos=True) for prompt in prompts()]
    harness.run()
    for uid, prompt in zip(uids, prompts(), strict=True):
        assert harness.answers[uid].tokens == expected_output(prompt, 21, ignore_eos=True)
        assert harness.answers[uid].finishes == [FinishReason.LENGTH]
    engine = harness.engine
    assert isinstance(engine, DraftingEngine)
    assert engine.accepted > 10
    assert engine.rejected > 10
    assert harness.scheduler.totals.output_tokens_total == 21 * len(uids)


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
    """The stop token is the first or the second token of its step."""
    prompt = prompts()[3]
    plain = expected_output(prompt, 20, ignore_eos=True)
    expected = plain[: plain.index(plain[output_tokens - 1]) + 1]
    harness = drafting_harness()
    stop_ids = (plain[output_tokens - 1],)
    uid = harness.add(prompt, max_tokens=20, ignore_eos=True, stop_token_ids=stop_ids)
    harness.run()
    assert harness.answers[uid].tokens == expected
    assert harness.answers[uid].finishes == [FinishReason.STOP]
