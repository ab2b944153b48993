"""The number of drafts follows from step times and measured acceptance."""

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given

from minisgl.core import StepCost
from minisgl.core.batch import DecodeLoad, DraftCounts, Int32Array
from minisgl.core.config import MAX_DRAFTS
from minisgl.drafts import HeadLengths, PricedLengths

# Milliseconds of an 8B model on an H200, without attention.
COST = StepCost(
    tokens=(1, 64, 128, 256, 512),
    seconds=(3.99e-3, 4.27e-3, 5.80e-3, 7.82e-3, 12.1e-3),
    per_decode_key_s=1e-9,
    per_prefill_pair_s=2e-11,
)


def rows_of(count: int) -> Int32Array:
    return np.arange(count, dtype=np.int32)


def record(lengths: PricedLengths, drafted: int, agreed: int, made: int) -> None:
    """Record one step of row 0."""
    lengths.record(rows_of(1), *np.array([[drafted], [agreed], [made]], dtype=np.int32))


def measured(rows: int, chance: float, steps: int = 200) -> PricedLengths:
    """Lengths after steps in which each row accepts a draft with this probability."""
    lengths, rng = PricedLengths(256), np.random.default_rng(0)
    for _ in range(steps):
        fails = rng.random((rows, MAX_DRAFTS)) >= chance
        agreed = np.where(fails.any(axis=1), fails.argmax(axis=1), MAX_DRAFTS).astype(np.int32)
        drafted, made = np.full(rows, MAX_DRAFTS, dtype=np.int32), np.zeros_like(agreed)
        lengths.record(rows_of(rows), drafted, agreed, made)
    return lengths


def choose(lengths: PricedLengths, rows: int, **changes: object) -> int:
    load = DecodeLoad(rows_of(rows), rows, 500 * rows, MAX_DRAFTS, COST, 0)
    return lengths.best(load._replace(**changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "chance", "expected"),
    [
        (1, 0.9, 7),
        (1, 0.0, 0),
        (16, 0.9, 7),
        (64, 0.9, 3),
        (64, 0.5, 1),
        (64, 0.1, 0),
        (256, 0.3, 0),
    ],
)
def test_more_drafts_are_forwarded_if_they_pay(rows: int, chance: float, expected: int) -> None:
    limit = max(256 // rows, 1) - 1
    assert choose(measured(rows, chance), rows, limit=min(limit, MAX_DRAFTS)) == expected


def test_no_drafts_are_forwarded_without_step_times() -> None:
    """The scheduler gives no step times beside prompts."""
    lengths = measured(1, 1.0)
    assert choose(lengths, 1) == 7
    assert choose(lengths, 1, cost=None) == 0


def test_requests_without_drafts_lower_the_gain() -> None:
    lengths = measured(4, 0.8)
    assert choose(lengths, 4) == 7
    assert choose(lengths, 4, num_reqs=120, limit=1) == 0


def test_a_new_request_begins_with_the_mean_acceptance_of_all() -> None:
    lengths = measured(8, 1.0)
    lengths.open(3)
    high = lengths.acceptance(rows_of(8))
    assert high[3] > 0.9
    lengths.record(np.array([3], dtype=np.int32), *np.zeros((3, 1), dtype=np.int32))
    assert lengths.acceptance(rows_of(8))[3] < high[3]
    assert lengths.acceptance(rows_of(8))[2] > 0.9


def test_a_row_without_any_match_counts_as_one_that_rejects() -> None:
    lengths = PricedLengths(1)
    for _ in range(30):
        record(lengths, drafted=0, agreed=0, made=0)
    assert choose(lengths, 1) == 0
    assert lengths.acceptance(rows_of(1))[0] < 0.1


@given(
    steps=st.lists(
        st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=4)
    ),
    limit=st.sampled_from([0, 1, 3, 7]),
)
def test_the_choice_stays_within_the_limit(steps: list[list[tuple[int, int]]], limit: int) -> None:
    lengths = PricedLengths(4)
    for step in steps:
        drafted, agreed = np.array(step, dtype=np.int32).T
        agreed, made = np.minimum(drafted, agreed), np.zeros_like(drafted)
        lengths.record(rows_of(len(step)), drafted, agreed, made)
    assert choose(lengths, 4, limit=limit) in [k for k in (0, 1, 3, 7) if k <= limit]
    chance = lengths.acceptance(rows_of(4))
    assert ((chance >= 0) & (chance < 1)).all()


def head(chance: float) -> HeadLengths:
    """Lengths of a head whose drafts are accepted with this probability, for one row.

    The row has no n-gram match. The next step makes no draft to measure the acceptance.
    """
    lengths, rng = HeadLengths(64), np.random.default_rng(0)
    for _ in range(200):
        fails = rng.random(3) >= chance
        record(lengths, drafted=3, agreed=int(fails.argmax()) if fails.any() else 3, made=3)
    for _ in range(33):
        record(lengths, drafted=0, agreed=0, made=0)
    return lengths


def counts(lengths: HeadLengths, made: int, cost: StepCost | None = COST) -> DraftCounts:
    return lengths.choose(DecodeLoad(rows_of(1), 1, 500, MAX_DRAFTS, cost, made))


@pytest.mark.parametrize(
    ("chance", "draft_ms", "expected"),
    [(0.9, 0.3, 7), (0.6, 0.3, 3), (0.6, 3.0, 0), (0.05, 0.3, 0)],
)
def test_a_head_makes_as_many_drafts_as_pay(chance: float, draft_ms: float, expected: int) -> None:
    lengths, cost = head(chance), msgspec.structs.replace(COST, per_draft_s=draft_ms / 1e3)
    assert counts(lengths, made=7, cost=cost) == (expected, expected)


@pytest.mark.parametrize("made", [0, 1, 3, 7])
def test_a_step_forwards_no_more_drafts_than_the_head_has_made(made: int) -> None:
    """The step still makes as many as pay, for the next one."""
    assert counts(head(0.95), made) == (made, 7)


def test_matches_without_drafts_of_the_head_are_measured_apart() -> None:
    """A step after prompts reports matches only. They do not count for the head."""
    lengths = head(0.05)
    before = lengths.acceptance(rows_of(1))
    for _ in range(100):
        record(lengths, drafted=7, agreed=7, made=0)
    assert lengths.acceptance(rows_of(1)) == before
    assert counts(lengths, made=1).forwarded == 0
    assert counts(lengths, made=0) == (7, 0), "n-grams pay, the head does not"
    lengths.open(0)
    assert counts(lengths, made=0, cost=None) == (0, 0)


def test_a_head_that_does_not_pay_makes_a_draft_in_some_steps() -> None:
    lengths, made = head(0.05), []
    for _ in range(64):
        made.append(counts(lengths, made=0).made)
        record(lengths, drafted=0, agreed=0, made=0)
    assert sum(made) == 4
    assert max(made) == 1
    assert counts(lengths, made=0, cost=None).made == 0
