"""The reference of decode attention, compared with attention over prefill chunks."""

import numpy as np
import pytest
import torch

from bench.noise import fill_noise
from minisgl.attention.base import PLAIN, AttentionRule, AttentionStep
from minisgl.attention.decode import new_tokens
from minisgl.attention.torch import TorchAttention
from minisgl.kernel.decode import decode, decode_scratch, tile_tokens
from minisgl.kernel.dispatch import qk_norm_rope_store
from minisgl.kvcache.pool import KVPool, KVSpec

CPU = torch.device("cpu")
Q_HEADS, KV_HEADS, DIM, PAGE = 6, 2, 16, 4


def step_of(start: list[int], lengths: list[int], rows: list[int]) -> AttentionStep:
    """A step of prefill chunks. The page table has 8 rows of 10 pages; the last is for padding."""
    table = torch.randperm(80, dtype=torch.int32).view(8, 10)
    arrays = [np.array(values, dtype=np.int32) for values in (start, lengths)]
    tensors = [torch.tensor(values, dtype=torch.int32) for values in (rows, start, lengths)]
    return AttentionStep(0, *arrays, *tensors, table)


@pytest.mark.parametrize(
    "rule",
    [
        PLAIN,
        AttentionRule(window=1),
        AttentionRule(window=7),
        AttentionRule(sinks=True),
        AttentionRule(soft_cap=0.7),
        AttentionRule(window=4, soft_cap=2.0, sinks=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("fused", ["fused", "queries", "turned"])
@pytest.mark.parametrize("new", [[1, 1, 1], [3, 1, 8]], ids=["one", "several"])
def test_new_tokens_attend_as_those_of_a_chunk(
    new: list[int], fused: str, rule: AttentionRule
) -> None:
    """Pages behind the windows hold NaN, since another request may own them.

    fused: the kernel gets "queries" alone, or also rotates; "turned": by other positions.
    """
    deltas = torch.tensor([-9, 0, -30, 0, 0], dtype=torch.int32) if fused == "turned" else None
    start, rows, padding, behind = [17, 0, 30], [4, 0, 6], 2, 3
    step = step_of(start, new, rows)
    spec = KVSpec(KV_HEADS, DIM, torch.float32)
    pool = KVPool(spec, layers=(0,), num_pages=80, page_size=PAGE, device=CPU)
    fill_noise(pool, 80)
    for row, first in zip(rows, start, strict=True):
        unused = 0 if rule.window is None else max(0, first + 1 - rule.window) // PAGE
        for part in pool.layer(0):
            part[step.page_table[row, :unused].long()] = torch.nan
    sinks = torch.randn(Q_HEADS) if rule.sinks else None
    keys, values = (x.clone() for x in pool.layer(0))
    qkv = torch.randn(sum(new), (Q_HEADS + 2 * KV_HEADS) * DIM)
    position = torch.cat([torch.arange(a, a + n) for a, n in zip(start, new, strict=True)])
    row = torch.tensor(rows).repeat_interleave(torch.tensor(new))
    slots = step.page_table[row, position // PAGE] * PAGE + position % PAGE
    norms = torch.randn(DIM), torch.randn(DIM), 1e-6, torch.randn(40, DIM)
    sizes = Q_HEADS, KV_HEADS, DIM
    turns = position
    if deltas is not None:
        turns = position + deltas[:3].repeat_interleave(torch.tensor(new))
    q = qk_norm_rope_store(qkv, *norms, turns, slots, *pool.layer(0), *sizes)
    expected = torch.empty_like(q)
    TorchAttention(pool, Q_HEADS, rule).prepare(step).forward(0, q, expected, sinks)

    out = torch.full((sum(new) + behind, Q_HEADS, DIM), torch.nan)
    where = [
        torch.cat((values, torch.full((padding,), fill, dtype=torch.int32)))
        for values, fill in zip(step[3:6], (7, 0, 1), strict=True)
    ]
    scratch = decode_scratch(5, *sizes, CPU, queries=8)
    used = q.flatten(1) if fused == "queries" else qkv
    inputs = torch.cat((used, torch.randn(behind, used.shape[1])))
    if fused == "queries":
        keys, values = pool.layer(0)
        norms = None, None, 0.0, None  # type: ignore[assignment]
    tensors = (inputs, *norms, keys, values, out, step.page_table, *where, scratch, None)
    decode(*tensors, 8, sinks, rule.window, rule.soft_cap, deltas)
    torch.testing.assert_close(out[: sum(new)], expected)
    assert not out[sum(new) :].any()
    for ours, theirs in zip((keys, values), pool.layer(0), strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize(
    ("lengths", "count"), [([1], 1), ([1, 2], 2), ([3, 1], 4), ([8, 8], 8), ([5], 8)]
)
def test_a_kernel_serves_steps_with_fewer_new_tokens(lengths: list[int], count: int) -> None:
    assert new_tokens(step_of([0] * len(lengths), lengths, [0] * len(lengths))) == count


def test_scratch_has_room_for_all_queries_of_a_kv_head() -> None:
    one, four = (decode_scratch(5, Q_HEADS, KV_HEADS, DIM, CPU, queries=n) for n in (1, 4))
    assert one.partial_outputs.shape[1:] == (3, DIM)
    assert four.partial_outputs.shape[1:] == (12, DIM)
    assert four.softmax_stats.shape[1:] == (2, 12)


def test_scratch_has_two_parts_for_each_program_that_runs_at_the_same_time() -> None:
    """A CPU counts as one multiprocessor. It has room for eight warps, which wide heads take."""
    narrow, wide = (decode_scratch(5, Q_HEADS, KV_HEADS, dim, CPU) for dim in (256, 512))
    assert (len(narrow.partial_outputs), len(narrow.softmax_stats)) == (16, 16)
    assert (len(wide.partial_outputs), len(wide.softmax_stats)) == (2, 2)


@pytest.mark.parametrize(
    ("group", "dim", "queries", "tokens"),
    [
        (8, 256, 8, 8),
        (8, 512, 1, 1),
        (8, 512, 8, 2),
        (5, 512, 8, 2),
        (2, 512, 4, 4),
        (20, 512, 4, 1),
    ],
)
def test_a_tile_of_wide_heads_has_at_most_16_queries_or_those_of_one_token(
    group: int, dim: int, queries: int, tokens: int
) -> None:
    """The scratch has the parts of a tile, and a semaphore for each tile."""
    assert tile_tokens(group, dim, queries) == tokens
    scratch = decode_scratch(5, 3 * group, 3, dim, CPU, queries)
    assert scratch.partial_outputs.shape[1:] == (group * tokens, dim)
    assert len(scratch.semaphores) == 5 * 3 * queries // tokens
