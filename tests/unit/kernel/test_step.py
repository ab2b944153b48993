"""The references of step metadata and of the fused projection, compared with plain loops."""

from operator import attrgetter

import numpy as np
import torch

from minisgl.core.columns import SAMPLING_COLUMNS, Column
from minisgl.kernel.dispatch import (
    kv_metadata,
    linear,
    put_tokens,
    qk_norm_rope_store,
    rms_norm,
    stage_tokens,
)
from minisgl.kernel.elementwise import rope
from minisgl.kernel.step import StepLayout


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_packed_views_cover_the_buffer_without_overlap() -> None:
    extra = Column("boost", np.float32, neutral=0, read=attrgetter("boost"))
    columns = (extra, *SAMPLING_COLUMNS, Column("wide", np.int64, neutral=0, read=float))
    layout = StepLayout(3, columns)
    buffer = torch.zeros(layout.words + 1, dtype=torch.int32)
    views, host = layout.views(buffer), buffer.numpy()
    fields = [*views[:6], *views.sampling.values()]
    host_fields = [*host[layout.fields].reshape(6, 3)]
    host_fields += [host[place].view(column.dtype) for column, place in layout.columns]
    for number, view in enumerate(fields, start=1):
        view.copy_(torch.full_like(view, number))
    for number, (view, array) in enumerate(zip(fields, host_fields, strict=True), start=1):
        assert set(view.tolist()) == set(array.tolist()) == {number}
    assert views.sampling["seed"].dtype == views.sampling["wide"].dtype == torch.int64
    assert views.sampling["boost"].dtype == torch.float32
    used = sum(view.nbytes for view in fields) // 4
    assert layout.words - used in (0, 1), "an odd number of elements is rounded up"
    assert layout.words % 2 == 0
    assert not buffer[used:].any()


def test_stage_tokens_of_a_mixed_step() -> None:
    page_table = torch.arange(12, dtype=torch.int32).view(3, 4)
    page_table[1, 1] = 50
    token_pool = torch.arange(100, 148, dtype=torch.int32).view(3, 16)
    ids, positions, slots = torch.full((3, 5), -1, dtype=torch.int32)
    stage_tokens(
        *(int32(1, 2), int32(6, 3), int32(0, 1)),
        *(int32(7, 8, 9, 10), 1, page_table, token_pool, 4, ids, positions, slots),
    )
    assert ids.tolist() == [122, 7, 8, 9, 10]
    assert positions.tolist() == [6, 3, 4, 5, 6]
    assert slots.tolist() == [50 * 4 + 2, 8 * 4 + 3, 9 * 4, 9 * 4 + 1, 9 * 4 + 2]


def test_stage_tokens_of_decode_requests_with_drafts() -> None:
    page_table = torch.arange(12, dtype=torch.int32).view(3, 4)
    token_pool = torch.arange(100, 148, dtype=torch.int32).view(3, 16)
    ids, positions, slots = torch.full((3, 5), -1, dtype=torch.int32)
    stage_tokens(
        *(int32(1, 2, 0), int32(6, 3, 0), int32(0, 3, 4)),
        *(int32(7), 4, page_table, token_pool, 4, ids, positions, slots),
    )
    assert ids.tolist() == [122, 123, 124, 135, 7]
    assert positions.tolist() == [6, 7, 8, 3, 0]
    assert slots.tolist() == [5 * 4 + 2, 5 * 4 + 3, 6 * 4, 8 * 4 + 3, 0]


def test_stage_tokens_adds_the_delta_of_a_request_to_the_turns_of_its_tokens() -> None:
    page_table, token_pool = torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, 16).int()
    ids, positions, slots, turns = torch.full((4, 5), -1, dtype=torch.int32)
    stage_tokens(
        *(int32(1, 2), int32(6, 3), int32(0, 2)),
        *(int32(7, 8, 9), 2, page_table, token_pool, 4, ids, positions, slots),
        *(int32(-5, 0), turns),
    )
    assert positions.tolist() == [6, 7, 3, 4, 5]
    assert turns.tolist() == [1, 2, 3, 4, 5]


def test_kv_metadata_counts_the_last_page() -> None:
    page_table = torch.arange(12, dtype=torch.int32).view(3, 4)
    indptr, last = torch.full((4,), -1, dtype=torch.int32), torch.full((3,), -1, dtype=torch.int32)
    indices = torch.full((9,), -1, dtype=torch.int32)
    kv_metadata(
        int32(2, 0, 1), int32(3, 4, 0), int32(1, 1, 1), page_table, 4, indptr, indices, last
    )
    assert indptr.tolist() == [0, 1, 3, 4]
    assert indices.tolist() == [8, 0, 1, 4, -1, -1, -1, -1, -1]
    assert last.tolist() == [4, 1, 1]


def test_kv_metadata_leaves_out_the_pages_behind_a_window() -> None:
    """The windows of the new tokens begin at positions 0, 7 and 8."""
    page_table = torch.arange(12, dtype=torch.int32).view(3, 4)
    indptr, last = torch.full((4,), -1, dtype=torch.int32), torch.full((3,), -1, dtype=torch.int32)
    indices = torch.full((9,), -1, dtype=torch.int32)
    where = int32(2, 0, 1), int32(3, 11, 12), int32(6, 1, 3), page_table
    kv_metadata(*where, 4, indptr, indices, last, 5)
    assert indptr.tolist() == [0, 3, 5, 7]
    assert indices.tolist() == [8, 9, 10, 1, 2, 6, 7, -1, -1]
    assert last.tolist() == [1, 4, 3]


def test_put_tokens_skips_reqs_that_do_not_sample() -> None:
    pool = torch.zeros(2, 4, dtype=torch.int32)
    put_tokens(pool, int32(1, 0), int32(2, 0), int32(1, 2), int32(1, 0), int32(9, 9))
    assert pool.tolist() == [[0, 0, 0, 0], [0, 0, 0, 9]]


def test_fused_projection_equals_its_parts() -> None:
    qkv = torch.randn(3, 4 * 8)  # two query heads, one KV head
    weights = torch.rand(2, 8)
    cos_sin, positions, slots = torch.rand(6, 8), int32(5, 0, 2), int32(3, 1, 0)
    pools = torch.zeros(2, 2, 2, 1, 8)
    given = qkv, weights[0], weights[1], 1e-6, cos_sin, positions, slots, pools[0], pools[1]
    out = qk_norm_rope_store(*given, 2, 1, 8)
    heads = qkv.view(3, 4, 8)
    q, k = rms_norm(heads[:, :2], weights[0], 1e-6), rms_norm(heads[:, 2:3], weights[1], 1e-6)
    q, k = rope(q, k, positions, cos_sin)
    assert torch.equal(out, q)
    assert torch.equal(pools[0].flatten(0, 1)[slots.long()], k)
    assert torch.equal(pools[1].flatten(0, 1)[slots.long()], heads[:, 3:])


def test_linear_on_cpu_equals_torch() -> None:
    x, weight, bias = torch.randn(2, 4), torch.randn(3, 4), torch.randn(3)
    torch.testing.assert_close(linear(x, weight, bias), x @ weight.T + bias)
