"""Block tables: the pages and the numbers of tokens that kernels of other packages get."""

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.attention.base import AttentionStep
from minisgl.attention.blocks import BlockTables, chip_obstacle, prefix_sums
from minisgl.kvcache.pool import KVPool, KVSpec

CPU = torch.device("cpu")
PAGE = 4
TABLE = torch.arange(1, 25, dtype=torch.int32).view(3, 8)  # pages 1 to 8 belong to row 0


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_pool() -> KVPool:
    spec = KVSpec(1, 8, torch.float32)
    return KVPool(spec, layers=(0,), num_pages=24, page_size=PAGE, device=CPU)


def make_step(rows: list[int], start: list[int], lengths: list[int]) -> AttentionStep:
    host = (np.array(start, dtype=np.int32), np.array(lengths, dtype=np.int32))
    return AttentionStep(0, *host, int32(*rows), int32(*start), int32(*lengths), TABLE)


def test_tables_have_the_pages_of_each_context() -> None:
    blocks = BlockTables(make_pool(), make_step([2, 0], [3, 9], [1, 3]), None)
    blocks.compute()
    assert blocks.contexts.tolist() == [4, 12]
    assert blocks.tables.tolist() == [[17, 18, 19], [1, 2, 3]]
    assert blocks.longest == 12


@pytest.mark.parametrize("window", [None, 2, 5])
def test_the_longest_context_fills_the_last_column(window: int | None) -> None:
    step = make_step([2, 0], [1, 8], [1, 1])  # 9 tokens: the third page has one token
    for captured in (False, True):
        blocks = BlockTables(make_pool(), step, window, captured=captured)
        assert blocks.longest == blocks.tables.shape[1] * PAGE


@pytest.mark.parametrize(
    ("start", "length", "window", "tokens", "pages"),
    [
        (9, 1, 5, 6, [2, 3]),  # positions 5 to 9, from the page of positions 4 to 7
        (8, 1, 5, 5, [2, 3]),
        (2, 1, 5, 3, [1]),
        (9, 4, 5, 9, [2, 3, 4]),
        (30, 1, 1, 3, [8]),
    ],
)
def test_a_context_begins_with_the_first_page_of_its_window(
    start: int, length: int, window: int, tokens: int, pages: list[int]
) -> None:
    for captured in (False, True):
        step = make_step([0], [start], [length])
        blocks = BlockTables(make_pool(), step, window, captured=captured)
        blocks.compute()
        assert blocks.contexts.tolist() == [tokens]
        assert blocks.tables[0, : len(pages)].tolist() == pages
        assert blocks.longest >= tokens


def test_captured_tables_follow_the_columns_of_later_steps() -> None:
    step = make_step([1, 1], [0, 0], [1, 1])
    blocks = BlockTables(make_pool(), step, None, captured=True)
    addresses = blocks.tables.data_ptr(), blocks.contexts.data_ptr()
    step.device_rows.copy_(int32(0, 2))
    step.device_start.copy_(int32(31, 4))
    blocks.compute()
    assert (blocks.tables.data_ptr(), blocks.contexts.data_ptr()) == addresses
    assert blocks.contexts.tolist() == [32, 5]
    assert blocks.tables[0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert blocks.tables[1, :2].tolist() == [17, 18]


def test_prefix_sums_begin_with_zero() -> None:
    sums = prefix_sums(int32(3, 1, 5))
    assert sums.dtype == torch.int32
    assert sums.tolist() == [0, 3, 4, 9]


def test_a_gpu_of_another_compute_capability_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    assert chip_obstacle(gpu, (9, 10)) is None  # without a GPU, as in minisgl compile
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    reason = "it needs a GPU of compute capability 9.x, 10.x, not 8.9"
    assert chip_obstacle(gpu, (9, 10)) == reason
    assert chip_obstacle(gpu, (8,)) is None
