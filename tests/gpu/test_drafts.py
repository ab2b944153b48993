"""The kernels of draft search and verification give exactly the results of their references.

With TRITON_INTERPRET=1 the tests run on a CPU.
"""

import os

import pytest
import torch
from torch import Tensor

from minisgl.kernel import drafts

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device"
    ),
]
LONGEST = 9_000 if INTERPRETED else 131_072


def int32(values: Tensor | list[int]) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32).to(DEVICE)


def token_pool(rows: int, columns: int, vocab: int) -> Tensor:
    return int32(torch.randint(0, vocab, (rows, columns)))


def check_search(
    pool: Tensor,
    rows: Tensor,
    cached: Tensor,
    lengths: Tensor,
    width: int,
    tails: Tensor | None = None,
    made: Tensor | None = None,
) -> tuple[list[int], list[int]]:
    """Compare with the reference. Returns the numbers of drafts, and which are predicted."""
    from minisgl.kernel.triton import drafts as kernels

    tails = torch.full_like(cached, pool.shape[1]) if tails is None else tails
    expected, found_expected = pool.clone(), torch.full((2, len(rows)), -7, device=DEVICE).int()
    drafts.find_drafts(expected, rows, cached, tails, lengths, width, *found_expected, made)
    before, found = cached.clone(), torch.full_like(found_expected, -9)
    kernels.find_drafts(pool, rows, cached, tails, lengths, width, *found, made)
    assert torch.equal(found, found_expected)
    assert torch.equal(pool, expected)
    assert torch.equal(cached, before)
    counts, predicted = found.tolist()
    return counts, predicted


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("vocab", [1, 2, 3, 30, 3000])
def test_drafts_of_short_rows(vocab: int, width: int) -> None:
    """Matches of all sizes, also at the start of a row, and rows that end with the pool."""
    rows, columns = 29, 73
    pool = token_pool(rows + 1, columns, vocab)
    cached = int32(torch.arange(rows + 1) * 2 % columns)
    cached[26:29] = int32([columns - 1, columns - 2, columns - width])
    lengths = int32(torch.randint(1, width + 1, (rows,)))
    counts, _ = check_search(pool, int32(torch.randperm(rows)), cached, lengths, width)
    assert any(counts) or vocab >= 30
    assert not all(counts)


@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize("vocab", [1, 2, 3, 9])
def test_drafts_of_short_rows_with_predictions(vocab: int, width: int) -> None:
    """Predictions of all lengths. Some begin before the end of the row, or shortly after it."""
    rows, columns = 60, 73
    pool = token_pool(rows, columns, vocab)
    cached = int32(torch.randint(0, columns, (rows,)))
    tails = int32(torch.randint(0, columns + 1, (rows,)))
    lengths = int32(torch.randint(1, width + 1, (rows,)))
    order = int32(torch.randperm(rows))
    counts, predicted = check_search(pool, order, cached, lengths, width, tails)
    assert any(predicted)
    assert sum(predicted) < sum(count > 0 for count in counts), "no match is in a row"


@pytest.mark.parametrize("width", [1, 8])
def test_matches_beside_the_drafts_of_a_head(width: int) -> None:
    """The head has made drafts for some rows. Short matches give drafts to the others only."""
    rows, columns = 60, 73
    pool = token_pool(rows, columns, 2)
    cached = int32(torch.randint(20, columns, (rows,)))
    made = int32(torch.arange(rows) % 3)
    counts, _ = check_search(
        pool, int32(torch.arange(rows)), cached, int32([width] * rows), width, made=made
    )
    assert {counts[0], counts[1]} == {width, 1} or width == 1
    assert all(counts[::3]), "each row without drafts of the head has a match of 2 tokens"


@pytest.mark.parametrize("reqs", [1, 3, 70])
def test_drafts_of_rows_of_different_lengths(reqs: int) -> None:
    """The match is in any part of a long row or of its prediction. Short rows stand beside it."""
    pool = token_pool(80, LONGEST + 1, 50_000)
    cached = int32(torch.randint(0, LONGEST // 2, (80,)))
    tails = int32(torch.randint(LONGEST // 2 + 8, LONGEST - 50, (80,)))
    rows = torch.randperm(80)[:reqs]
    in_tail = []
    for index, row in enumerate(rows.tolist()):
        if index % 4 == 3:
            cached[row] = index % 7
            continue
        last = int(cached[row]) if index else LONGEST // 2
        cached[row] = max(last, 60)
        last, size = int(cached[row]), (2, 3, 4, 5, 17, 40)[index % 6]
        first, end = (int(tails[row]), LONGEST - 1) if index % 2 else (0, last - size)
        end = int(torch.randint(first + size - 1, max(end, first + size), (1,)))
        pool[row, end + 1 - size : end + 1] = pool[row, last + 1 - size : last + 1].clone()
        in_tail.append(index % 2)
    lengths = int32(torch.randint(1, 9, (reqs,)))
    counts, predicted = check_search(pool, int32(rows), cached, lengths, 8, tails)
    expected = [index for index in range(reqs) if index % 4 != 3]
    assert all(counts[index] for index in expected)
    assert [predicted[index] for index in expected] == in_tail


@pytest.mark.parametrize("end", [1, 2, 1023, 1024, 1025, LONGEST - 72])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 32, 40])
def test_a_match_at_the_border_of_a_tile(size: int, end: int) -> None:
    pool = int32(torch.arange(LONGEST + 1)).unsqueeze(0)
    last = LONGEST - 8
    size = min(size, end + 1)
    pool[0, end + 1 - size : end + 1] = pool[0, last + 1 - size : last + 1].clone()
    following = pool[0, end + 1 : end + 6].tolist()
    counts, _ = check_search(pool, int32([0]), int32([last]), int32([5]), 5)
    assert counts == [5 if size > 1 else 0]
    if size > 1:
        assert pool[0, last + 1 : last + 6].tolist() == following


def test_a_step_without_requests_has_no_drafts() -> None:
    pool = token_pool(1, 8, 2)
    assert check_search(pool, int32([]), int32([3]), int32([]), 4) == ([], [])


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    ("num_decode", "chunks"), [(1, 0), (0, 3), (5, 2), (300, 9)], ids=lambda count: str(count)
)
@pytest.mark.parametrize("broken", [0.0, 0.2, 1.0], ids=["finite", "some", "none"])
def test_accepted_tokens(num_decode: int, chunks: int, width: int, broken: float) -> None:
    """Requests with and without drafts, chunks that do not sample, logits that are not finite.

    The last rows end with the token pool.
    """
    from minisgl.kernel.triton import drafts as kernels

    reqs, columns = num_decode + chunks, 64
    pool = token_pool(reqs + 2, columns, 2)
    lengths = torch.randint(1, width + 1, (reqs,))
    samples = torch.randint(0, 2, (reqs,))
    samples[:num_decode] = 1
    samples[max(num_decode - 2, 1) : num_decode] = 0  # padding
    draws = torch.where(torch.arange(reqs) < num_decode, lengths, 1)
    first = draws.cumsum(0) - draws
    drawn = torch.randint(0, 2, (int(draws.sum()),))
    drawn[torch.rand(len(drawn)) < 0.05] = 7
    finite = (torch.rand(len(drawn)) >= broken).to(DEVICE)
    found = lengths[:num_decode] * torch.randint(0, 2, (num_decode,))
    rows = torch.randperm(reqs + 2)[:reqs]
    cached = torch.randint(0, columns - width, (reqs + 2,))
    cached[rows[-3:]] = columns - 1 - lengths[-3:]
    inputs = [int32(x) for x in (lengths, samples, found, first, drawn)]
    results = []
    for run in (drafts.accept_drafts, kernels.accept_drafts):
        state = pool.clone(), int32(cached)
        found_args = state[0], int32(rows), state[1], *inputs, finite, num_decode, width
        results.append((*state, *run(*found_args)))
    for theirs, ours in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_captured_kernels_follow_their_inputs() -> None:
    """One graph finds drafts and accepts them; each replay compares with the references."""
    from minisgl.kernel.triton import drafts as kernels

    reqs, width, columns = 20, 4, 5000
    pool = token_pool(reqs + 1, columns, 3)
    rows, cached = int32(torch.randperm(reqs)), int32([0] * (reqs + 1))
    lengths, samples, tails = int32([1] * reqs), int32([1] * reqs), cached.clone()
    found = int32([[0] * reqs] * 2)
    first, drawn = int32([0] * reqs), int32([0] * (reqs * width))
    finite = torch.ones(reqs * width, dtype=torch.bool, device=DEVICE)

    def run(module: object, pool: Tensor, cached: Tensor, found: Tensor) -> drafts.Accepted:
        inputs = rows, cached, tails, lengths, width
        module.find_drafts(pool, *inputs, *found)  # type: ignore[attr-defined]
        step = lengths, samples, found[0], first, drawn, finite, reqs, width
        accepted: drafts.Accepted = module.accept_drafts(  # type: ignore[attr-defined]
            pool, rows, cached, *step
        )
        return accepted

    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(kernels, pool, cached, found)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        accepted = run(kernels, pool, cached, found)
        graph.capture_end()
        for longest in (10, 1000, columns - width):
            pool.copy_(token_pool(*pool.shape, 3))
            cached.copy_(torch.randint(0, longest, (reqs + 1,)))
            tails.copy_(torch.randint(columns // 2, columns + 1, (reqs + 1,)))
            lengths.copy_(torch.randint(1, width + 1, (reqs,)))
            first.copy_(lengths.cumsum(0) - lengths)
            drawn.copy_(torch.randint(0, 3, (reqs * width,)))
            finite.copy_(torch.rand(reqs * width) < 0.9)
            for result in (found, *accepted):
                result.copy_(torch.ones_like(result))
            expected = pool.clone(), cached.clone(), torch.zeros_like(found)
            theirs = run(drafts, *expected)
            graph.replay()
            stream.synchronize()
            for a, b in zip((pool, cached, found, *accepted), (*expected, *theirs), strict=True):
                assert torch.equal(a, b)
