"""Requests of layers with states, and copies of states to pages and back."""

import pytest
import torch

from minisgl.kernel.states import LOADED, StateStep, begin_states, copy_states


def begin(
    boundaries: list[int], requests: list[tuple[int, int, int]], decode: int, size: int | None
) -> StateStep:
    """requests: row, start and length of each. size: tokens with padding, for 6 requests."""
    rows, start, lengths = torch.tensor(requests, dtype=torch.int32).unbind(1)
    first, count = (lengths.cumsum(0) - lengths).int(), int(lengths.sum())
    out = torch.full((6, len(requests) if size is None else 6), -7, dtype=torch.int32)
    state = torch.tensor(boundaries, dtype=torch.int32)
    tokens = count if size is None else size
    begin_states(state, rows, start, lengths, first, decode, 16, count, tokens, out)
    boundaries[:] = state.tolist()
    return StateStep.of(out, chunks=1)


def test_states_move_to_the_page_of_the_first_draft_and_of_the_last_prompt_token() -> None:
    boundaries = [16, 32, 0, 64, 0]
    step = begin(boundaries, [(0, 31, 8), (1, 48, 1), (2, 0, 33), (3, 80, 16)], 2, None)
    assert step.base.tolist() == [16, 32, 0, 64]
    assert step.target.tolist() == [16, 48, 32, 80]
    assert boundaries == [16, 48, 32, 80, 0]


def test_a_row_begins_without_a_state_or_with_a_loaded_one() -> None:
    boundaries = [96, LOADED, 0]
    step = begin(boundaries, [(0, 0, 20), (1, 48, 5)], 0, None)
    assert (step.base.tolist(), step.target.tolist()) == ([0, 48], [16, 48])
    assert boundaries == [16, 48, 0]


def test_padding_is_a_request_of_the_last_row() -> None:
    boundaries = [0, 0, 0]
    step = begin(boundaries, [(1, 0, 20), (0, 0, 3)], 0, 32)
    assert step.rows.tolist() == [1, 0, 2, 2, 2, 2]
    assert step.lengths.tolist() == [20, 3, 9, 0, 0, 0]
    assert step.first.tolist() == [0, 20, 23, 32, 32, 32]
    assert step.start[2:].tolist() == step.base[2:].tolist() == [0] * 4
    assert boundaries == [0, 16, 0], "padding moves no boundary"


@pytest.mark.parametrize("words", [4, 6])
def test_a_copy_comes_back_from_its_pages_and_changes_nothing_else(words: int) -> None:
    """Three slices, and pages of a copy that are in no order and hold more than the copy."""
    kept = torch.randint(0, 2**31 - 1, (4, 40), dtype=torch.int32)
    pool = torch.zeros(3, 20, words, dtype=torch.int32)
    pages = torch.tensor([[7, 2, 19, 11], [3, 4, 0, 9]], dtype=torch.int32)
    before, saved = kept.clone(), torch.tensor([2, 0], dtype=torch.int32)
    copy_states(kept, saved, pages, pool, True)
    used = set(pages.flatten().tolist())
    assert all((pool[:, page] == 0).all() for page in range(20) if page not in used)
    copy_states(kept, torch.tensor([1, 3], dtype=torch.int32), pages, pool, False)
    assert torch.equal(kept, before[[0, 2, 2, 0]])
