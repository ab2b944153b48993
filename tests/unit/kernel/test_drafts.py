"""The references of draft search and verification, compared with plain loops."""

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from minisgl.kernel.drafts import LONG_MATCH, MAX_MATCH, MIN_MATCH, accept_drafts, find_drafts
from tests.examples import examples

WIDTH = 5
COLUMNS = 24


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def plain_drafts(tokens: list[int], prediction: list[int], count: int) -> tuple[list[int], bool]:
    """Return the drafts after `tokens`: the continuation of the longest, then last match.

    Also returns whether the match is in the prediction.
    """
    for size in range(min(MAX_MATCH, len(tokens)), MIN_MATCH - 1, -1):
        for text in (prediction, tokens):
            for after in range(len(text) - 1, size - 1, -1):
                if text[after - size : after] == tokens[-size:]:
                    piece = text[after:]
                    drafts = [piece[nth % len(piece)] for nth in range(count)]
                    return drafts, text is prediction
    return [], False


TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=16)


@settings(max_examples=examples(500))
@given(
    data=st.data(),
    contents=st.lists(st.tuples(TEXT, st.just([]) | TEXT), min_size=1, max_size=4),
)
def test_drafts_continue_the_longest_and_last_match(
    data: st.DataObject, contents: list[tuple[list[int], list[int]]]
) -> None:
    """A prediction may begin before the end of the row, which then has overwritten a part of it."""
    reqs = len(contents)
    pool = torch.full((reqs + 1, COLUMNS), 7, dtype=torch.int32)
    rows = data.draw(st.permutations(range(reqs)))
    lengths = data.draw(st.lists(st.integers(1, WIDTH), min_size=reqs, max_size=reqs))
    cached = torch.full((reqs + 1,), -1, dtype=torch.int32)
    tails = torch.full_like(cached, COLUMNS)
    for row, (tokens, prediction) in zip(rows, contents, strict=True):
        tails[row] = COLUMNS - len(prediction)
        pool[row, tails[row] :] = int32(*prediction)
        pool[row, : len(tokens)] = int32(*tokens)
        cached[row] = len(tokens) - 1
    before, found = pool.clone(), torch.full((reqs,), -1, dtype=torch.int32)
    predicted = found.clone()
    inputs = int32(*rows), cached, tails, int32(*lengths), WIDTH
    find_drafts(pool, *inputs, found, predicted)
    again, outputs = pool.clone(), (found.clone(), predicted.clone())
    find_drafts(again, *inputs, *outputs)
    assert torch.equal(again, pool)
    assert torch.equal(torch.stack(outputs), torch.stack((found, predicted)))
    sources = zip(found.tolist(), predicted.tolist(), strict=True)
    for row, (tokens, prediction), length, source in zip(
        rows, contents, lengths, sources, strict=True
    ):
        left = prediction[max(len(tokens) + WIDTH - (COLUMNS - len(prediction)), 0) :]
        drafts, is_predicted = plain_drafts(tokens, left, length)
        assert source == (len(drafts), is_predicted)
        end = min(len(tokens) + length, COLUMNS)
        expected = tokens + (drafts or [tokens[-1]] * length)
        assert pool[row, :end].tolist() == expected[:end]
        assert torch.equal(pool[row, end:], before[row, end:])


def test_long_matches_come_before_later_ones() -> None:
    """The row's end stands twice before it. The earlier place also has the 29 tokens before it."""
    text = list(range(10, 40))
    tokens = [*text, 1, 2, 38, 39, 3, 4, *text]
    pool = int32(*tokens, 0, 0, 0).unsqueeze(0)
    found, predicted = int32(0), int32(0)
    last, columns = int32(len(tokens) - 1), int32(pool.shape[1])
    find_drafts(pool, int32(0), last, columns, int32(2), 2, found, predicted)
    assert pool[0, len(tokens) :].tolist() == [1, 2, 0]
    assert (found.item(), predicted.item()) == (2, 0)


def test_drafts_end_with_the_token_pool() -> None:
    pool = int32(1, 2, 3, 1, 2).unsqueeze(0)
    found, predicted = int32(0), int32(0)
    find_drafts(pool, int32(0), int32(4), int32(5), int32(3), WIDTH, found, predicted)
    assert pool.tolist() == [[1, 2, 3, 1, 2]]


@settings(max_examples=examples(300))
@given(data=st.data(), num_decode=st.integers(0, 3), num_chunks=st.integers(0, 2))
def test_accepted_tokens_are_those_of_a_plain_loop(
    data: st.DataObject, num_decode: int, num_chunks: int
) -> None:
    reqs = num_decode + num_chunks
    if not reqs:
        return
    rows = data.draw(st.permutations(range(reqs)))
    cached = data.draw(st.lists(st.integers(0, 12), min_size=reqs, max_size=reqs))
    lengths = data.draw(st.lists(st.integers(1, WIDTH), min_size=reqs, max_size=reqs))
    samples = [1] * num_decode + [data.draw(st.integers(0, 1)) for _ in range(num_chunks)]
    pool = torch.full((reqs, COLUMNS), 9, dtype=torch.int32)
    first, drawn, finite, found = [], [], [], []
    for index, row in enumerate(rows):
        first.append(len(drawn))
        draws = lengths[index] if index < num_decode else 1
        drawn += data.draw(st.lists(st.integers(0, 1), min_size=draws, max_size=draws))
        finite += [data.draw(st.integers(0, 9)) > 0 for _ in range(draws)]
        if index < num_decode:
            count = lengths[index]
            drafts = data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
            found.append(data.draw(st.sampled_from([0, count])))
            pool[row, cached[row] + 1 : cached[row] + 1 + count] = int32(*drafts)
    before, lengths_after = pool.clone(), int32(*cached)
    result = accept_drafts(
        pool,
        int32(*rows),
        lengths_after,
        int32(*lengths),
        int32(*samples),
        int32(*found),
        int32(*first),
        int32(*drawn),
        torch.tensor(finite),
        num_decode,
        WIDTH,
    )
    for index, row in enumerate(rows):
        start, length, at = cached[row], lengths[index], first[index]
        if index >= num_decode:
            new = [drawn[at]] if samples[index] else []
            begin, agreed = start + length, 0
            assert lengths_after[row] == start + length
        else:
            begin, agreed, new = start + 1, 0, [drawn[at]]
            while agreed < min(found[index], length) and (
                drawn[at + agreed] == before[row, begin + agreed]
            ):
                agreed += 1
            while len(new) <= min(agreed, length - 1) and finite[at + len(new)]:
                new.append(drawn[at + len(new)])
            assert lengths_after[row] == start + len(new)
        assert result.counts[index] == len(new)
        assert result.tokens[index, : len(new)].tolist() == new
        assert result.agreed[index] == agreed
        assert result.finite[index] == finite[at]
        expected = before[row].clone()
        expected[begin : begin + len(new)] = int32(*new)
        assert torch.equal(pool[row], expected)


def test_a_match_of_many_tokens_replaces_the_drafts_of_a_head() -> None:
    """Row 0 repeats one token less than a match needs, row 1 as many.

    Row 2 repeats as many as row 0. The head has made no drafts for it, so its match counts.
    """
    text = list(range(LONG_MATCH))
    short, enough = [90, *text[1:], 50, 51, 91, *text[1:]], [*text, 50, 51, 91, *text]
    pool = torch.full((3, 40), 7, dtype=torch.int32)
    cached, made = int32(len(short) - 1, len(enough) - 1, len(short) - 1), int32(2, 2, 0)
    for row, tokens in enumerate((short, enough, short)):
        pool[row, : len(tokens)] = int32(*tokens)
        pool[row, len(tokens) : len(tokens) + 2] = int32(60, 61)
    before, found, predicted = pool.clone(), int32(-1, -1, -1), int32(-1, -1, -1)
    inputs = int32(0, 1, 2), cached, int32(40, 40, 40), int32(3, 3, 3), 4
    find_drafts(pool, *inputs, found, predicted, made)
    assert found.tolist() == [2, 3, 3]
    assert pool[0].equal(before[0])
    assert pool[1, len(enough) : len(enough) + 3].tolist() == [50, 51, 91]
    assert pool[2, len(short) : len(short) + 3].tolist() == [50, 51, 91]
    find_drafts(pool, int32(0), *inputs[1:3], int32(1), 4, found[:1], predicted[:1], made)
    assert found[0] == 1, "a step forwards fewer tokens than there are drafts"
