"""Copies of contexts: their layout, their content, and when a copy makes attention faster."""

import numpy as np
import pytest
import torch

from minisgl.kernel.contexts import ContextCopy
from minisgl.kernel.dispatch import gather_kv


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_each_context_begins_at_a_tile_with_zeros_behind_it() -> None:
    page_table = torch.randperm(3 * 100, dtype=torch.int32).view(3, 100)
    pools = torch.randn(2, 300, 4, 2, 8)
    copy = ContextCopy(100 * 4, pools[0], torch.float32)
    start, lengths = int32(130, 0, 100), int32(3, 128, 200)
    queries, keys = copy.layout(start.numpy(), lengths.numpy())
    assert queries.dtype == keys.dtype == torch.int32
    assert queries.tolist() == [0, 3, 3, 131, 131, 331, 331]
    assert keys.tolist() == [0, 133, 256, 384, 384, 684, 768]
    slots, *copied = copy.find(int32(2, 0, 1), start, lengths, page_table, 768)
    gather_kv(pools[0], pools[1], slots, copied[0], copied[1])
    for found, pool in zip(copied, pools, strict=True):
        assert found.shape == (768, 2, 8)
        contexts = [pool[page_table[row].long()].flatten(0, 1) for row in (2, 0, 1)]
        assert torch.equal(found[:133], contexts[0][:133])
        assert not found[133:256].any()
        assert torch.equal(found[256:384], contexts[1][:128])
        assert torch.equal(found[384:684], contexts[2][:300])
        assert not found[684:].any()


def test_a_copy_for_a_window_begins_at_its_first_page() -> None:
    """The windows begin at positions 0 and 171, which is in page 42. Earlier entries are stale."""
    page_table = torch.randperm(2 * 100, dtype=torch.int32).view(2, 100)
    stale = page_table.clone()
    stale[0, :42] = 10**6
    pools = torch.randn(2, 200, 4, 2, 8)
    copy = ContextCopy(100 * 4, pools[0], torch.float32, window=30)
    start, lengths = int32(29, 200), int32(3, 150)
    queries, keys = copy.layout(start.numpy(), lengths.numpy())
    assert queries.tolist() == [0, 3, 3, 153, 153]
    assert keys.tolist() == [0, 32, 128, 310, 384]
    slots, *copied = copy.find(int32(1, 0), start, lengths, stale, 384)
    gather_kv(pools[0], pools[1], slots, copied[0], copied[1])
    for found, pool in zip(copied, pools, strict=True):
        assert torch.equal(found[:32], pool[page_table[1].long()].flatten(0, 1)[:32])
        assert not found[32:128].any()
        assert torch.equal(found[128:310], pool[page_table[0].long()].flatten(0, 1)[168:350])
        assert not found[310:].any()


def test_a_copy_for_a_window_has_room_for_long_contexts() -> None:
    copy = ContextCopy(20_000, torch.empty(1, 16, 1, 1), torch.half, window=4096)
    start, lengths = int32(500_001).numpy(), int32(15_904).numpy()
    assert copy.holds(start, lengths)
    assert copy.fits(start, lengths)
    assert copy.groups(start.repeat(2), lengths.repeat(2)) == [(0, 1), (1, 2)]
    assert not copy.fits(start.repeat(2), lengths.repeat(2))
    assert not copy.holds(start, lengths + 96)


@pytest.mark.parametrize(
    ("window", "group", "chunk", "pays"),
    [
        (128, 8, 8192, False),
        (1024, 2, 8192, True),
        (1024, 2, 2048, False),
        (4096, 5, 128, False),
        (4096, 5, 8192, True),
    ],
)
def test_a_copy_for_a_window_pays_for_wide_windows(
    window: int, group: int, chunk: int, pays: bool
) -> None:
    copy = ContextCopy(16_384, torch.empty(1, 16, 8, 1), torch.float32, window)
    assert copy.pays(int32(100_000).numpy(), int32(chunk).numpy(), group) == pays
    assert ContextCopy.may_pay(window, group) >= pays


def test_prompts_are_cut_into_groups_that_fit() -> None:
    """The room is 16,384 keys. Contexts begin at multiples of 128."""
    copy = ContextCopy(64 * 16, torch.empty(1, 16, 1, 1), torch.half)
    start, lengths = int32(16000, 0, 8000, 8000, 1, 0), int32(300, 84, 192, 193, 1, 9000)
    groups = copy.groups(start.numpy(), lengths.numpy())
    assert groups == [(0, 1), (1, 3), (3, 5), (5, 6)]
    assert all(copy.fits(start[a:b].numpy(), lengths[a:b].numpy()) for a, b in groups)
    assert copy.groups(start[:1].numpy(), lengths[:1].numpy()) == [(0, 1)]


@pytest.mark.parametrize(
    ("prompts", "q_heads", "kv_heads", "pays"),
    [
        ([(0, 8192)], 32, 8, True),
        ([(0, 8192)], 16, 8, True),
        ([(0, 2000)], 16, 8, False),
        ([(30720, 2048)], 32, 8, True),
        ([(7616, 448)], 32, 8, True),
        ([(1792, 448)], 32, 8, False),
        ([(7616, 448)], 8, 2, False),
        ([(7616, 448)], 16, 8, False),
        ([(16384, 256)], 32, 8, False),
        ([(0, 500)] * 3, 32, 8, False),
        ([(0, 4000), (39000, 20)], 32, 8, False),
        ([(100, 20000)] * 3, 32, 8, True),
    ],
)
def test_copying_pays_for_many_queries(
    prompts: list[tuple[int, int]], q_heads: int, kv_heads: int, pays: bool
) -> None:
    pool = torch.empty(1, 16, kv_heads, 1)
    start, lengths = np.array(prompts, dtype=np.int32).T
    copy = ContextCopy(2560 * 16, pool, torch.float32)
    assert copy.pays(start, lengths, q_heads // kv_heads) == pays


def test_a_copy_has_room_for_a_chunk_of_many_short_prompts() -> None:
    copy = ContextCopy(64 * 16, torch.empty(1, 16, 8, 1), torch.float32)
    start, lengths = np.zeros(8, dtype=np.int32), np.full(8, 1024, dtype=np.int32)
    assert copy.fits(start.repeat(2), lengths.repeat(2))
    assert not copy.fits(start.repeat(2), lengths.repeat(2) + 1)


def test_a_copy_has_room_for_the_longest_context() -> None:
    copy = ContextCopy(2000 * 10, torch.empty(1, 10, 8, 1), torch.float32)
    start, lengths = np.array([12_000], dtype=np.int32), np.array([8000], dtype=np.int32)
    assert copy.fits(start, lengths)
    assert not copy.fits(start + 97, lengths)  # one more tile


def test_reads_beyond_32_bits_are_counted() -> None:
    copy = ContextCopy(32768 * 16, torch.empty(1, 16, 1, 1), torch.float32)
    start, lengths = np.array([500_000], dtype=np.int32), np.array([24_000], dtype=np.int32)
    assert copy.pays(start, lengths, 1)
