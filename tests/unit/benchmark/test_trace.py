"""Reading and replaying traces, and the ideal cache against an exhaustive search."""

import json
import random
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from minisgl.benchmark.trace import (
    BLOCK_TOKENS,
    Turns,
    ideal_hit_ratio,
    lru_hit_ratio,
    read_trace,
    replay,
)
from minisgl.core import ConfigError
from minisgl.core.batch import Int32Array


def write(folder: Path, *requests: tuple[float, int, int, list[int]]) -> Path:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [json.dumps(dict(zip(names, request, strict=True))) for request in requests]
    (folder / "trace.jsonl").write_text("\n".join(lines))
    return folder / "trace.jsonl"


def test_equal_hash_ids_give_equal_blocks(tmp_path: Path) -> None:
    path = write(tmp_path, (1000, 700, 5, [1, 2]), (3000, 600, 7, [1, 3]), (4000, 512, 1, [9]))
    load = replay(read_trace(path, 2), time_scale=0.5)
    first, second = load.prompts
    assert (len(first), len(second)) == (700, 600)
    assert (first[:BLOCK_TOKENS] == second[:BLOCK_TOKENS]).all()
    assert (first[BLOCK_TOKENS:600] != second[BLOCK_TOKENS:]).any()
    assert load.max_tokens == [5, 7]
    assert load.arrivals_s == [0.0, 1.0]


def test_scaled_prompts_share_the_same_blocks(tmp_path: Path) -> None:
    path = write(tmp_path, (0, 1024, 40, [1, 2]), (0, 1024, 1, [1, 3]))
    load = replay(read_trace(path), length_scale=0.25, max_prompt_tokens=200, largest_id=9)
    first, second = load.prompts
    assert len(first) == len(second) == 200
    assert (first[:128] == second[:128]).all()
    assert max(first.max(), second.max()) == 9
    assert load.max_tokens == [10, 1]


def agents(folder: Path, *requests: dict[str, object]) -> Path:
    """A trace of agents. Each request is a block of its own, and has one token of output."""
    lines = [
        {"timestamp": 0, "input_length": 16, "output_length": 1, "hash_ids": [n], "id": n} | request
        for n, request in enumerate(requests)
    ]
    (folder / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder / "trace.jsonl"


def test_a_request_is_due_after_the_gap_behind_the_last_end(tmp_path: Path) -> None:
    after = {"after": [0, 1], "gap_ms": 4000, "timestamp": 9}
    load = replay(read_trace(agents(tmp_path, {}, {}, after)), time_scale=0.5)
    assert load.arrivals_s is not None
    turns = Turns(load, load.arrivals_s)
    assert turns.first == [(0.0, 0), (0.0, 1)]
    assert turns.ended(1, 3.0) == []
    assert turns.ended(0, 7.0) == [(9.0, 2)]


def test_the_requests_of_an_agent_have_numbers(tmp_path: Path) -> None:
    path = agents(
        tmp_path, {"session": 1}, {"session": 1, "agent": 1, "after": [0]}, {"session": 1}
    )
    turns = replay(read_trace(path)).turns
    assert turns is not None
    assert [turn.number for turn in turns] == [1, 1, 2]


def test_the_next_prompt_of_an_agent_begins_with_the_whole_prompt_before_it(
    tmp_path: Path,
) -> None:
    """A server saves the state of a hybrid model at the end of a prompt, so a replay whose next
    turn did not contain this end lost the hits that sessions have."""
    path = agents(
        tmp_path,
        {"session": 1, "input_length": 600, "hash_ids": [7, 20]},
        {"session": 1, "input_length": 700, "hash_ids": [7, 21], "agent": 1},
        {"session": 1, "input_length": 800, "hash_ids": [7, 22], "after": [0]},
        {"session": 1, "input_length": 1100, "hash_ids": [7, 8, 23], "after": [2]},
        {"session": 1, "input_length": 1200, "hash_ids": [9, 8, 24], "after": [3]},
    )
    first, other, second, third, compacted = replay(read_trace(path)).prompts
    assert third[:800].tolist() == second.tolist()
    assert second[:600].tolist() == first.tolist()
    assert shared(other, first) == BLOCK_TOKENS
    assert shared(compacted, third) == 0


def shared(first: Int32Array, second: Int32Array) -> int:
    """Return the number of tokens with which both prompts begin."""
    size = min(len(first), len(second))
    return int((first[:size] == second[:size]).cumprod().sum())


def test_a_request_that_waits_for_a_later_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"request 0 .* waits for request 1"):
        replay(read_trace(agents(tmp_path, {"after": [1]}, {})))


@pytest.mark.parametrize(
    "line",
    [
        '{"timestamp": 0}',
        "no json",
        '{"timestamp":0,"input_length":513,"output_length":1,"hash_ids":[1]}',
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, (0, 1, 1, [1]))
    path.write_text(path.read_text() + "\n" + line)
    with pytest.raises(ConfigError, match="line 2"):
        read_trace(path)


def prompt(*pages: int) -> Int32Array:
    """Return pages of 4 tokens, and one more token, so that all pages can be hits."""
    return np.array([token for page in pages for token in [page] * 4] + [0], dtype=np.int32)


def test_whole_pages_are_hits_and_one_token_is_always_computed() -> None:
    assert ideal_hit_ratio([prompt(1, 2), prompt(1, 3)], 10, 4) == pytest.approx(4 / 18)
    twice = [prompt(1, 2)[:8]] * 2
    assert ideal_hit_ratio(twice, 10, 4) == pytest.approx(4 / 16)
    assert ideal_hit_ratio(twice, 10, 16) == 0.0
    assert ideal_hit_ratio([], 10, 4) == 0.0


def test_no_eviction_policy_has_more_hits_than_the_ideal_cache() -> None:
    source = random.Random(0)
    for _ in range(60):
        prompts = [
            prompt(*(source.randrange(3) for _ in range(source.randint(1, 3)))) for _ in range(5)
        ]
        pages = source.randint(1, 4)
        best = _best_hits(prompts, frozenset(), pages)
        total = sum(len(each) for each in prompts)
        assert ideal_hit_ratio(prompts, pages, 4) == pytest.approx(best / total)


def _best_hits(prompts: list[Int32Array], cached: frozenset[tuple[int, ...]], pages: int) -> int:
    """Return the hits when the best of all possible sets of prefixes is kept after each prompt."""
    if not prompts:
        return 0
    tokens = prompts[0].tolist()
    chain = [tuple(tokens[: 4 * (i + 1)]) for i in range(len(tokens) // 4)]
    hits = next((i for i, prefix in enumerate(chain) if prefix not in cached), len(chain)) * 4
    held = cached | set(chain)
    kept = combinations(held, min(pages, len(held)))
    return hits + max(_best_hits(prompts[1:], frozenset(choice), pages) for choice in kept)


def test_lru_keeps_the_last_used_prompts_and_their_first_pages() -> None:
    a, b, c = prompt(1, 2), prompt(3, 4), prompt(1, 5)
    assert lru_hit_ratio([a, b, a], 4, 4) == pytest.approx(8 / 27)
    assert lru_hit_ratio([a, b, a], 3, 4) == pytest.approx(4 / 27), "the end of a was evicted"
    assert lru_hit_ratio([a, b, a], 2, 4) == 0.0
    assert lru_hit_ratio([a, c, b, a], 4, 4) == pytest.approx(8 / 36), "1 was used after 2"
    assert lru_hit_ratio([], 4, 4) == 0.0
