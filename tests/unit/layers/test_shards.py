"""Dividing dimensions over ranks: even shares, padding, whole heads, replicas."""

import pytest

from minisgl.core import ConfigError
from minisgl.layers.shards import split_evenly, split_heads


@pytest.mark.parametrize(("full", "size"), [(8, 1), (8, 2), (9, 2), (5, 4), (3, 8), (151936, 7)])
def test_even_shares_cover_each_row_once(full: int, size: int) -> None:
    parts = [split_evenly("x", full, rank, size) for rank in range(size)]
    assert len({part.local for part in parts}) == 1
    covered = [row for part in parts for row in range(part.begin, part.end)]
    assert covered == list(range(full))
    assert all(part.end - part.begin <= part.local for part in parts)


def test_heads_are_never_cut() -> None:
    parts = [split_heads("k", 4, 16, rank, 2) for rank in range(2)]
    assert [(part.begin, part.end) for part in parts] == [(0, 32), (32, 64)]


def test_fewer_heads_than_ranks_are_shared_by_neighbours() -> None:
    parts = [split_heads("k", 2, 16, rank, 4, copies=True) for rank in range(4)]
    assert [part.begin for part in parts] == [0, 0, 16, 16]
    assert {part.local for part in parts} == {16}


@pytest.mark.parametrize(
    ("heads", "size", "copies"), [(6, 4, True), (3, 2, True), (2, 3, True), (2, 4, False)]
)
def test_head_counts_that_do_not_divide_are_refused(heads: int, size: int, copies: bool) -> None:
    with pytest.raises(ConfigError, match=f"{heads} heads of k cannot be split"):
        split_heads("k", heads, 16, 0, size, copies=copies)
