"""Requests of a model with recurrent states: hits, snapshots and planted bugs."""

from collections.abc import Callable

import numpy as np
import pytest

from minisgl.core import FinishReason, SchedulerConfig, StepCost
from minisgl.core.batch import Int32Array, StateCopies
from minisgl.core.config import MIN_CHUNK_TOKENS
from minisgl.kvcache import states
from minisgl.kvcache.states import States
from tests.unit.scheduler.drafts import DRAFTERS, ChangingDrafts
from tests.unit.scheduler.fake_engine import FakeEngine, expected_output
from tests.unit.scheduler.fake_states import FakeStates
from tests.unit.scheduler.harness import Harness
from tests.unit.scheduler.integrity import check_snapshots, states_of

PAGE = 16
SNAPSHOT = 197  # pages of a snapshot of Qwen3.6-35B-A3B
SYSTEM = [1 + (7 * i + i // 61) % 61 for i in range(8192)]


def new_harness(num_pages: int = 4000, rows: int = 64, budget: int = 2048) -> Harness:
    engine = FakeEngine(num_pages, PAGE, rows, 12_000, snapshot_pages=SNAPSHOT)
    return Harness(engine, SchedulerConfig(prefill_budget_tokens=budget, target_step_ms=None))


def cached_tokens(harness: Harness, prompt: list[int], answer: int = 4, **fields: int) -> int:
    """Run one request to its end; return the prompt tokens that were cached."""
    uid = harness.add(prompt, max_tokens=answer, ignore_eos=True, **fields)
    harness.run()
    assert harness.answers[uid].tokens == expected_output(prompt, answer, ignore_eos=True)
    check_snapshots(harness.scheduler.memory, harness.engine)
    return harness.answers[uid].cached_tokens


def test_the_second_request_with_a_system_prompt_hits_all_of_it() -> None:
    harness = new_harness()
    assert cached_tokens(harness, [*SYSTEM, *[3] * 300], first=len(SYSTEM)) == 0
    assert cached_tokens(harness, [*SYSTEM, *[4] * 200], first=len(SYSTEM)) == len(SYSTEM)


def test_a_request_that_the_pool_cannot_hold_beside_a_snapshot_runs_without_a_hit() -> None:
    """Regression: it was never admitted, which ended the scheduler when no other request ran."""
    harness = new_harness(num_pages=740)
    assert cached_tokens(harness, [*SYSTEM, *[3] * 300], first=len(SYSTEM)) == 0
    assert cached_tokens(harness, [*SYSTEM, *[3] * 100], first=len(SYSTEM)) == len(SYSTEM)
    assert cached_tokens(harness, [*SYSTEM, *[4] * 3000]) == 0


def test_a_snapshot_is_kept_as_long_as_a_short_answer_after_it() -> None:
    """Regression: it was evicted before prompts that ended during the answer."""
    harness = new_harness(num_pages=1150)
    chat, other = [3] * 4096, [4] * 4096
    for prompt, answer in ((chat, 40), (other, 1)):
        harness.add(prompt, max_tokens=answer, ignore_eos=True)
    harness.run()
    assert cached_tokens(harness, [5] * 3200) == 0  # its pages are those of `other`
    assert cached_tokens(harness, [*chat, 6]) == len(chat) - PAGE


def test_the_third_request_hits_a_prefix_that_no_message_names() -> None:
    """The second one computes the prefix again, and leaves a snapshot at the junction."""
    harness = new_harness()
    found = [cached_tokens(harness, [*SYSTEM, *[own] * 700]) for own in (3, 4, 5)]
    assert found == [0, 0, len(SYSTEM)]


def test_a_burst_computes_its_shared_prefix_once() -> None:
    harness, own = new_harness(num_pages=20_000), 40
    prompts = [[*SYSTEM, *[1 + nth % 60] * own, 1 + nth // 60] for nth in range(64)]
    for prompt in prompts:
        harness.add(prompt, max_tokens=2, ignore_eos=True)
    harness.run()
    computed = harness.scheduler.totals.prefill_tokens_total
    assert computed == len(SYSTEM) + len(prompts) * (own + 1)


def test_the_same_prompt_again_is_a_hit() -> None:
    """The last token is computed, so a snapshot at the very end of the prompt would be no hit."""
    for length in (1600, 1601):
        harness, prompt = new_harness(), SYSTEM[:length]
        assert cached_tokens(harness, prompt) == 0
        assert cached_tokens(harness, prompt) == (length - 1) // PAGE * PAGE


@pytest.mark.parametrize(("answer", "stripped"), [(4, True), (100, False)])
def test_a_chat_of_ten_turns_is_near_the_ideal_with_one_snapshot(
    answer: int, stripped: bool
) -> None:
    """The next turn leaves the thinking out, or has the whole answer, too short for a snapshot."""
    harness = new_harness()
    header, tail = [61, 62, 63], [50, 51]
    history, sequences, cached, shared, total = SYSTEM[:1000], [], 0, 0, 0
    for turn in range(10):
        history = [*history, *[(turn * 7 + i) % 59 for i in range(600)]]
        prompt = [*history, *header]
        cached += cached_tokens(harness, prompt, answer, stable=len(history), first=1000)
        shared += max([0, *(common(prompt, sequence) for sequence in sequences)])
        total += len(prompt)
        said = expected_output(prompt, answer, ignore_eos=True)
        sequences.append([*prompt, *said])
        kept = tail if stripped else [*said, *tail]
        history = [*history, *header, *kept, *[(turn * 11 + i) % 57 for i in range(250)]]
    assert cached / total > shared / total - (0.01 if stripped else 0.02)
    (kind,) = states_of(harness.scheduler.memory)
    assert kind.snapshots.num_cached == 1, "the last turn needs no snapshot of an earlier one"


def test_a_turn_without_a_long_answer_before_it_hits_the_turn_before_that() -> None:
    """Regression: the end of the answer replaced the only snapshot that the next turn could use."""
    harness = new_harness()
    first = SYSTEM[:4000]
    second = [*first, *[9] * 400]  # too few new tokens for a snapshot before the answer
    assert cached_tokens(harness, first) == 0
    assert cached_tokens(harness, second, answer=1000) == 4000 - PAGE
    assert cached_tokens(harness, [*second, *[8] * 600]) == 4000 - PAGE


def test_a_chat_outlives_prompts_that_came_later_and_once() -> None:
    """The snapshot of its second turn has replaced the one of the first turn, which was a hit."""
    harness = new_harness(num_pages=2000)
    chat = SYSTEM[:4000]
    assert cached_tokens(harness, [*chat, 7, 7, 7], stable=4000) == 0
    chat = [*chat, *[9] * 1000]
    assert cached_tokens(harness, [*chat, 7, 7, 7], stable=5000) == 4000
    for once in range(10, 20):
        cached_tokens(harness, [once] * 4000)
    assert cached_tokens(harness, [*chat, *[11] * 600]) == 4992


def common(a: list[int], b: list[int]) -> int:
    """The number of equal leading tokens."""
    different = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(different, min(len(a), len(b)))


SMALL = 4  # tokens of a page in the tests below


def small_harness(monkeypatch: pytest.MonkeyPatch, overlap: bool = True) -> Harness:
    """One row, so that each request gets the row of the one before."""
    monkeypatch.setattr(states, "MIN_NEW_TOKENS", SMALL)
    monkeypatch.setattr(states, "MIN_BRANCH_TOKENS", SMALL)
    engine = FakeEngine(200, SMALL, 1, 256, snapshot_pages=2)
    config = SchedulerConfig(prefill_budget_tokens=16, target_step_ms=None, overlap=overlap)
    return Harness(engine, config)


def test_a_preempted_request_computes_less_than_two_pages_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = small_harness(monkeypatch)
    late = harness.add(SYSTEM[:70], max_tokens=30, ignore_eos=True, priority=1)
    while len(harness.answers[late].tokens) < 12:
        harness.step()
    urgent = harness.add(SYSTEM[100:160], max_tokens=4, ignore_eos=True)
    harness.run()
    assert harness.scheduler.totals.preemptions_total == 1
    assert harness.answers[late].tokens == expected_output(SYSTEM[:70], 30, ignore_eos=True)
    assert len(harness.answers[urgent].tokens) == 4
    again = harness.scheduler.totals.prefill_tokens_total - 70 - 60
    assert 0 < again < 2 * SMALL


def test_prompts_go_on_although_a_page_has_more_tokens_than_the_smallest_chunk() -> None:
    """A chunk ends at the end of a page, and the time of a step allows the smallest chunk only."""
    engine = FakeEngine(100, 2 * MIN_CHUNK_TOKENS, 2, 512, snapshot_pages=2)
    harness = Harness(engine, SchedulerConfig(target_step_ms=1.0))
    costs = {"per_decode_key_s": 0.0, "per_prefill_pair_s": 0.0}
    slow = StepCost(tokens=(1, 256), seconds=(0.01, 10.0), **costs)
    harness.scheduler.view.cost = slow
    first = harness.add(SYSTEM[:10], max_tokens=40, ignore_eos=True)
    while not harness.answers[first].tokens:
        harness.step()
    second = harness.add(SYSTEM[:200], max_tokens=2, ignore_eos=True)
    while not harness.answers[second].tokens:
        harness.step()
        assert not harness.answers[first].finishes, "the prompt waits until no request decodes"


def turns(harness: Harness) -> None:
    """Chats that wait for the one row, and continue from each other's states."""
    for first in range(3):
        for length in (41, 57, 74, 90):
            prompt = SYSTEM[first : first + length]
            harness.add(prompt, max_tokens=15, ignore_eos=True)
            prompt = [*prompt, *expected_output(prompt, 15, ignore_eos=True), 9, 9, 9]
            harness.add(prompt, max_tokens=15, ignore_eos=True)
    harness.run()
    (kind,) = states_of(harness.scheduler.memory)
    assert kind.snapshots.num_cached > 3
    check_snapshots(harness.scheduler.memory, harness.engine)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_save_precedes_the_next_owner_of_the_row(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = small_harness(monkeypatch, overlap)
    turns(harness)
    pairs = [b.states for b in harness.engine.batches if b.states is not None]
    same_row = [{*p.save_rows.tolist()} & {*p.load_rows.tolist()} for p in pairs]
    same_pages = [{*p.save_pages.ravel()} & {*p.load_pages.ravel()} for p in pairs]
    assert any(same_row), "no request gets a row whose state the same batch saves"
    assert any(same_pages), "no request loads a snapshot that the same batch saves"


def test_an_answer_that_ends_during_a_step_with_rejected_drafts_is_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step in flight was planned as if all drafts of the step before were accepted."""
    monkeypatch.setattr(states, "MIN_NEW_TOKENS", 8)
    engine = FakeEngine(200, 8, 2, 256, drafter=DRAFTERS["wrong"], snapshot_pages=2)
    config = SchedulerConfig(prefill_budget_tokens=16, target_step_ms=None)
    harness = Harness(engine, config, drafts=ChangingDrafts(7))
    (kind,) = states_of(harness.scheduler.memory)
    stopped = 0
    for length in range(30, 50):
        answer = harness.answers[harness.add(SYSTEM[length : 2 * length], max_tokens=60)]
        harness.run()
        if answer.finishes == [FinishReason.STOP]:
            stopped += 1
            end = (length + len(answer.tokens) - 1) // 8 * 8
            assert [*kind.snapshots._lru[0]][-1].tokens == end
    assert stopped > 5
    check_snapshots(harness.scheduler.memory, harness.engine)


def save_one_batch_late(monkeypatch: pytest.MonkeyPatch) -> None:
    held, copies = [], States.copies

    def late(kind: States, step: int) -> StateCopies | None:
        found = copies(kind, step)
        none = (np.zeros(0, np.int32), np.zeros((0, 2), np.int32))
        saves, loads = (found[:2], found[2:]) if found else (none, none)
        held.append(saves)
        return StateCopies(*(held.pop(0) if len(held) > 1 else none), *loads)

    monkeypatch.setattr(States, "copies", late)


def load_before_save(monkeypatch: pytest.MonkeyPatch) -> None:
    def reversed_order(fake: FakeStates, copies: StateCopies, slots: np.ndarray) -> None:
        fake.load(copies, slots)
        fake.save(copies, slots)

    monkeypatch.setattr(FakeStates, "copy", reversed_order)


def save_as_one_page_less(monkeypatch: pytest.MonkeyPatch) -> None:
    grow = States.grow

    def wrong(kind: States, rows: Int32Array, tokens: Int32Array) -> None:
        grow(kind, rows, tokens)
        kind._rows.state_at[rows] -= SMALL

    monkeypatch.setattr(States, "grow", wrong)


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (save_one_batch_late, "snapshot|state"),
        (load_before_save, "snapshot|state"),
        (save_as_one_page_less, "wrong position"),
    ],
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = small_harness(monkeypatch)
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=message):
        turns(harness)
