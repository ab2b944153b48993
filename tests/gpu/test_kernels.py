"""Triton kernels against float64 or their torch references, on fresh random input.

Outputs that a kernel receives are poisoned first. With TRITON_INTERPRET=1 the same tests run on
CPU, slowly, in Triton's interpreter.
"""

import os

import pytest
import torch
from torch import Tensor

from minisgl.kernel import elementwise, gather, rotary, step
from minisgl.kernel.decode import decode, decode_scratch
from minisgl.kernel.step import StepLayout

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device"
    ),
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "fp16", "bf16"])


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def error(out: Tensor, expected: Tensor) -> float:
    """Relative error in the Frobenius norm; NaN where the output holds one."""
    out, expected = out.double(), expected.double()
    return ((out - expected).norm() / expected.norm()).item()


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(1, 1024), (7, 128), (3, 5120), (2, 8192), (5, 80)])
def test_rms_norm(dtype: torch.dtype, rows: int, width: int) -> None:
    from minisgl.kernel.triton import norm

    x, weight = normal(rows, width, dtype=dtype), normal(width, dtype=dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert error(norm.rms_norm(x, weight, 1e-6), expected) < TOLERANCE[dtype]
    wider = normal(rows, 2 * width, dtype=dtype)
    wider[:, width:] = x
    assert torch.equal(
        norm.rms_norm(wider[:, width:], weight, 1e-6), norm.rms_norm(x, weight, 1e-6)
    )
    plain = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert error(norm.rms_norm(x, None, 1e-6), plain) < TOLERANCE[dtype]
    deep = x.view(rows, 1, width)
    assert norm.rms_norm(deep, weight, 1e-6).shape == deep.shape
    assert norm.rms_norm(x[:0], weight, 1e-6).shape == (0, width)


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(1, 1024), (9, 4096), (3, 5120)])
def test_add_rms_norm_updates_the_residual(dtype: torch.dtype, rows: int, width: int) -> None:
    from minisgl.kernel.triton import norm

    x, residual = normal(rows, width, dtype=dtype), normal(rows, width, dtype=dtype)
    weight = normal(width, dtype=dtype)
    total = x + residual
    expected = elementwise.rms_norm(total.double(), weight.double(), 1e-5)
    out, carried = norm.add_rms_norm(x, residual, weight, 1e-5)
    assert carried is residual
    assert error(carried, total) < TOLERANCE[dtype]
    if not INTERPRETED:  # the interpreter truncates to bfloat16, the hardware rounds
        assert torch.equal(carried, total)
    assert error(out, expected) < TOLERANCE[dtype]


@DTYPES
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
@pytest.mark.parametrize(("rows", "width"), [(1, 3072), (5, 12288), (3, 100)])
def test_activation_and_mul(dtype: torch.dtype, name: str, rows: int, width: int) -> None:
    from minisgl.kernel.triton import elementwise as kernels

    kernel, reference = (getattr(module, name) for module in (kernels, elementwise))
    x = normal(rows, 2 * width, dtype=dtype) * 3
    assert error(kernel(x), reference(x.double())) < TOLERANCE[dtype]
    assert kernel(x[:0]).shape == (0, width)


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (3, 100)])
def test_multiply_sigmoid(dtype: torch.dtype, rows: int, width: int) -> None:
    """The gate is part of wider rows, as the projection of attention returns it."""
    from minisgl.kernel.triton import elementwise as kernels

    x, gate = normal(rows, width, dtype=dtype), normal(rows, 3 * width, dtype=dtype)[:, :width]
    expected = elementwise.multiply_sigmoid(x.double(), gate.double())
    assert kernels.multiply_sigmoid(x, gate) is x
    assert error(x, expected) < TOLERANCE[dtype]
    assert kernels.multiply_sigmoid(x[:0], gate[:0]).shape == (0, width)


@DTYPES
def test_gather_embedding_gives_zeros_for_other_ranks(dtype: torch.dtype) -> None:
    from minisgl.kernel.triton import elementwise as kernels

    weight = normal(100, 1536, dtype=dtype)
    ids = torch.tensor([50, 149, 49, 150, 0, 99], dtype=torch.int32, device=DEVICE)
    out = kernels.gather_embedding(ids, weight, 50)
    assert torch.equal(out, elementwise.gather_embedding(ids.long(), weight, 50))
    assert not out[[2, 3, 4]].any()
    images = normal(7, 3072, dtype=dtype)[:, :1536]
    ids[[1, 4]] = torch.tensor([~6, ~0], dtype=torch.int32, device=DEVICE)
    out = kernels.gather_embedding(ids, weight, 50, images)
    assert torch.equal(out, elementwise.gather_embedding(ids.long(), weight, 50, images))


@DTYPES
@pytest.mark.parametrize("normed", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim"), [(16, 8, 128), (5, 1, 64), (4, 2, 256), (6, 3, 96)]
)
def test_qk_norm_rope_store(
    dtype: torch.dtype, normed: bool, q_heads: int, kv_heads: int, head_dim: int
) -> None:
    from minisgl.kernel.triton import rotary as kernels

    tokens, pages, page_size = 13, 9, 4
    qkv = normal(tokens, (q_heads + 2 * kv_heads) * head_dim, dtype=dtype)
    before = qkv.clone()
    weights = [normal(head_dim, dtype=dtype) if normed else None for _ in range(2)]
    angles = torch.rand(50, head_dim // 2, device=DEVICE) * 6.28
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.randint(0, 50, (tokens,), device=DEVICE, dtype=torch.int32)
    slots = torch.randperm(pages * page_size, device=DEVICE)[:tokens].int()
    shape = (pages, page_size, kv_heads, head_dim)
    pools = torch.full((2, 2, *shape), torch.nan, device=DEVICE, dtype=dtype)
    common = (1e-6, cos_sin, positions, slots)
    sizes = (q_heads, kv_heads, head_dim)
    expected = rotary.qk_norm_rope_store(qkv, *weights, *common, *pools[0], *sizes)
    out = kernels.qk_norm_rope_store(qkv, *weights, *common, *pools[1], *sizes)
    assert torch.equal(qkv, before)
    assert out.shape == (tokens, q_heads, head_dim)
    assert error(out, expected) < TOLERANCE[dtype]
    ours, theirs = pools[1].flatten(1, 2), pools[0].flatten(1, 2)
    assert torch.equal(ours.isnan(), theirs.isnan())  # nothing else was written
    assert error(ours[0, slots.long()], theirs[0, slots.long()]) < TOLERANCE[dtype]
    assert torch.equal(ours[1, slots.long()], theirs[1, slots.long()])


@pytest.mark.parametrize("kind", ["norm", "plain", "queries"])
@pytest.mark.parametrize(
    ("group", "dim"), [(1, 64), (2, 128), (5, 64), (8, 64), (16, 128), (2, 256)]
)
@pytest.mark.parametrize("contexts", [[1], [700], [3, 65, 64, 1, 200, 129, 63, 1]], ids=len)
@pytest.mark.parametrize(("padded", "page_size"), [(0, 4), (1, 16), (140, 4), (3, 128)])
def test_decode_splits_contexts_anywhere(
    padded: int, page_size: int, contexts: list[int], group: int, dim: int, kind: str
) -> None:
    """Two calls with one scratch agree, because each call leaves zeros in the semaphores.

    Before a call, the new token's slot, the unused pages and the output are NaN. With 140 padded
    requests the programs have one warp.
    """
    from minisgl.kernel.triton import decode as kernels

    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    kv_heads, reqs = 2, len(contexts)
    pages = [-(-context // page_size) for context in contexts]
    order = torch.randperm(sum(pages) + 3, dtype=torch.int32)
    table = torch.full((reqs + 3, max(pages)), -1, dtype=torch.int32)
    rows = torch.randperm(reqs + 2)[:reqs].int()
    pools = normal(2, sum(pages) + 3, page_size, kv_heads, dim, dtype=dtype)
    for row, count, context in zip(rows.tolist(), pages, contexts, strict=True):
        table[row, :count], order = order[:count], order[count:]
        if kind != "queries":
            pools[:, int(table[row, count - 1]), (context - 1) % page_size] = torch.nan
    pools[:, order.long()] = torch.nan
    start = torch.cat((torch.tensor(contexts).int() - 1, torch.zeros(padded, dtype=torch.int32)))
    rows = torch.cat((rows, torch.full((padded,), reqs + 2, dtype=torch.int32)))
    where = [tensor.to(DEVICE) for tensor in (table, rows, start, torch.ones_like(start))]
    q_heads = kv_heads * group
    scratch = decode_scratch(reqs + padded, q_heads, kv_heads, dim, torch.device(DEVICE))
    if INTERPRETED:
        slots = 14  # two for each of 7 programs
        scratch = scratch._replace(
            partial_outputs=torch.full((slots, *scratch.partial_outputs.shape[1:]), torch.nan),
            softmax_stats=torch.full((slots, *scratch.softmax_stats.shape[1:]), torch.nan),
        )
    heads = q_heads if kind == "queries" else q_heads + 2 * kv_heads
    qkv = normal(reqs + padded, 2 * heads * dim, dtype=dtype).chunk(2, 1)[1]
    weights = [normal(dim, dtype=dtype) if kind == "norm" else None for _ in range(2)]
    angles = torch.rand(max(contexts), dim // 2, device=DEVICE) * 6.28
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    norms = *weights, 1e-6, None if kind == "queries" else cos_sin
    expected = normal(reqs + padded, q_heads, dim, dtype=dtype)
    theirs = pools.clone()
    decode(qkv, *norms, *theirs, expected, *where, scratch)
    for _ in range(2):
        ours, out = pools.clone(), torch.full_like(expected, torch.nan)
        kernels.count_blocks(*where[1:], len(table) - 1, scratch)
        kernels.decode(qkv, *norms, *ours, out, *where, scratch)
        assert error(out, expected) < TOLERANCE[dtype]
        assert torch.equal(ours.isnan(), theirs.isnan())  # nothing else was written
        assert error(ours.nan_to_num(), theirs.nan_to_num()) < TOLERANCE[dtype]
        assert not scratch.semaphores.any()


def packed_step() -> tuple[StepLayout, Tensor, Tensor, Tensor]:
    """3 decode reqs, chunks of 5, 1 and 300 tokens, 2 padded reqs; tables without equal entries.

    The chunk ids stand after the columns of the buffer.
    """
    layout = StepLayout(8)
    buffer = torch.full((layout.words + 400,), -7, dtype=torch.int32)
    views = layout.views(buffer)
    lengths = torch.tensor([1, 1, 1, 5, 1, 300, 1, 1])
    views.rows.copy_(torch.tensor([4, 0, 6, 2, 5, 1, 9, 9]))
    views.start.copy_(torch.tensor([7, 16, 399, 0, 31, 50, 0, 0]))
    views.lengths.copy_(lengths)
    views.first.copy_(lengths.cumsum(0) - lengths)
    views.samples.copy_(torch.tensor([1, 1, 1, 0, 1, 1, 0, 0]))
    buffer[layout.words :] = torch.randint(0, 1000, (400,))
    views.sampling["seed"].copy_(torch.arange(8) - 2**62)
    page_table = torch.randperm(10 * 25, dtype=torch.int32).view(10, 25)
    page_table[4, 0], page_table[6, 24] = 5000, 6000
    token_pool = torch.randperm(10 * 420, dtype=torch.int32).view(10, 420)
    return layout, buffer.to(DEVICE), page_table.to(DEVICE), token_pool.to(DEVICE)


def test_packed_views_travel_with_the_buffer() -> None:
    layout, buffer, _, _ = packed_step()
    views = layout.views(buffer)
    assert views.sampling["seed"].tolist() == (torch.arange(8) - 2**62).tolist()
    views.sampling["top_p"].fill_(0.25)
    assert set(layout.views(buffer.clone()).sampling["top_p"].tolist()) == {0.25}


def test_step_metadata() -> None:
    from minisgl.kernel.triton import step as kernels

    layout, buffer, page_table, token_pool = packed_step()
    views, chunk_ids = layout.views(buffer), buffer[layout.words :]
    outputs = []
    for module in (step, kernels):
        out = torch.full((4, 311), -1, dtype=torch.int32, device=DEVICE)
        reqs, (*rows, turns) = (views.rows, views.start, views.first), out
        given = (*reqs, chunk_ids, 3, page_table, token_pool, 16)
        module.stage_tokens(*given, *rows, views.samples, turns)
        plain = out.clone()
        module.stage_tokens(*given, *plain[:3])
        assert torch.equal(plain, out)
        outputs.append(out)
    assert torch.equal(*outputs)
    ids, positions, slots, turns = outputs[1]
    assert turns[:5].tolist() == [8, 17, 400, 0, 1], "the fourth request has the delta 0"
    assert ids[2] == token_pool[6, 399]
    assert ids[3:].tolist() == chunk_ids[:308].tolist()
    assert positions[:10].tolist() == [7, 16, 399, 0, 1, 2, 3, 4, 31, 50]
    assert slots[0] == 5000 * 16 + 7
    assert slots[2] == 6000 * 16 + 15


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_kv_metadata(page_size: int, window: int | None) -> None:
    from minisgl.kernel.triton import step as kernels

    reqs, columns = 37, 600
    page_table = torch.randperm(40 * columns, dtype=torch.int32, device=DEVICE).view(40, columns)
    rows = torch.randperm(40, device=DEVICE)[:reqs].int()
    start = torch.randint(0, min(columns * page_size, 3000) - 8, (reqs,), device=DEVICE).int()
    lengths = torch.randint(1, 8, (reqs,), device=DEVICE).int()
    outputs = []
    for module in (step, kernels):
        out = [
            torch.full((n,), -1, dtype=torch.int32, device=DEVICE)
            for n in (reqs + 1, reqs * columns, reqs)
        ]
        module.kv_metadata(rows, start, lengths, page_table, page_size, *out, window)
        outputs.append(out)
    for ours, theirs in zip(*outputs, strict=True):
        assert torch.equal(ours, theirs)
    assert outputs[1][2].min() >= 1
    assert outputs[1][2].max() <= page_size


@pytest.mark.parametrize("shape", [(8, 128), (2, 64), (5, 96)], ids=["8x128", "2x64", "5x96"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_contexts_are_gathered(page_size: int, window: int | None, shape: tuple[int, int]) -> None:
    """The pool is NaN outside of the contexts. The kernels write nothing after the copied keys.

    Entries of the page table that precede the window are out of range.
    """
    from minisgl.kernel.triton import gather as kernels

    contexts = torch.tensor([1, 700, 128, 129, 2000, 255], dtype=torch.int32)
    pages = -(-contexts // page_size)
    order = torch.randperm(int(pages.sum()) + 3, dtype=torch.int32)
    table = torch.full((9, int(pages.max())), -1, dtype=torch.int32)
    rows = torch.randperm(8)[: len(contexts)].int()
    pools = torch.full((2, len(order), page_size, *shape), torch.nan)
    for row, count, context in zip(rows, pages, contexts, strict=True):
        table[row, :count], order = order[:count], order[count:]
        each = torch.arange(int(context))
        pools[:, table[row, each // page_size].long(), each % page_size] = normal(
            2, int(context), *shape
        ).cpu()
    start = contexts - torch.tensor([1, 300, 128, 1, 7, 200], dtype=torch.int32)
    firsts = gather.first_pages(start, window, page_size)
    for row, first in zip(rows, firsts, strict=True):
        table[row, :first] = 10**6
    contexts -= firsts * page_size
    keys = int((-(-contexts // gather.TILE) * gather.TILE).sum())
    ends = contexts + firsts * page_size
    where = [tensor.to(DEVICE) for tensor in (rows, start, ends - start, table)]
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    pools = pools.to(DEVICE, dtype)
    outputs = []
    for module in (gather, kernels):
        slots = torch.full((keys + 256,), -7, dtype=torch.int32, device=DEVICE)
        copies = torch.full((2, keys + 256, *shape), torch.nan, dtype=dtype, device=DEVICE)
        module.context_slots(*where, page_size, slots, window)
        module.gather_kv(*pools, slots[:keys], *copies[:, :keys])
        outputs.append((slots, copies))
    (expected_slots, expected), (slots, copies) = outputs
    assert torch.equal(slots, expected_slots)
    assert torch.equal(copies[:, :keys], expected[:, :keys])
    assert not copies[:, :keys].isnan().any()
    assert copies[:, keys:].isnan().all()


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("shape", [(1, 1), (37, 6), (300, 8)], ids=str)
def test_sinks(shape: tuple[int, int], dim: int) -> None:
    from minisgl.kernel.triton import elementwise as kernels

    tokens, heads = shape
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    out, sinks = normal(tokens, heads, dim, dtype=dtype), normal(heads, dtype=dtype)
    lse = normal(tokens, heads) * 30  # some sinks take nearly the whole softmax
    expected, scaled = out.clone(), out.clone()
    elementwise.add_sinks(expected, lse, sinks)
    kernels.add_sinks(scaled, lse, sinks)
    torch.testing.assert_close(scaled, expected)


@pytest.mark.skipif(INTERPRETED, reason="needs 4 GB")
def test_slots_beyond_32_bits_of_elements_are_gathered() -> None:
    from minisgl.kernel.triton import gather as kernels

    pool = torch.empty(2**31 // 2048 + 200, 1, 8, 256, dtype=torch.bfloat16, device=DEVICE)
    last = normal(128, 8, 256, dtype=torch.bfloat16)
    pool[-128:, 0] = last
    slots = torch.arange(len(pool) - 128, len(pool), dtype=torch.int32, device=DEVICE)
    keys, values = torch.full((2, *last.shape), torch.nan, dtype=last.dtype, device=DEVICE)
    kernels.gather_kv(pool, pool, slots.flip(0), keys, values)
    assert torch.equal(keys.flip(0), last)
    assert torch.equal(values.flip(0), last)


def test_put_tokens_leaves_the_rest_alone() -> None:
    from minisgl.kernel.triton import step as kernels

    layout, buffer, _, token_pool = packed_step()
    views = layout.views(buffer)
    reqs = views.rows, views.start, views.lengths, views.samples
    pools = token_pool.clone(), token_pool.clone()
    tokens = torch.arange(8, dtype=torch.int32, device=DEVICE) + 10_000
    step.put_tokens(pools[0], *reqs, tokens)
    kernels.put_tokens(pools[1], *reqs, tokens)
    assert torch.equal(*pools)
    assert (pools[1] != token_pool).sum() == 5


@pytest.mark.parametrize("count", [1, 256, 1001])
def test_words_are_copied_between_pinned_memory_and_the_device(count: int) -> None:
    from minisgl.kernel.triton import step as kernels

    sent = torch.arange(count, dtype=torch.int32, pin_memory=not INTERPRETED)
    on_device = torch.full((count + 8,), -1, dtype=torch.int32, device=DEVICE)
    kernels.copy_words(on_device[4:-4], sent)
    back = torch.full((count + 8,), -1, dtype=torch.int32, pin_memory=not INTERPRETED)
    kernels.copy_words(back[4:-4], on_device[4:-4])
    if not INTERPRETED:
        torch.cuda.synchronize()
    for found in (on_device.cpu(), back):
        assert found.tolist() == [-1] * 4 + list(range(count)) + [-1] * 4
