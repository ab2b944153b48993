"""The kernels of the FP8 KV cache against their references, on random and on extreme values.

Memory that a kernel must not read, and all outputs, hold NaN before each call. With
TRITON_INTERPRET=1 the tests run on the CPU, without the GPU's conversion instructions.
"""

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.kernel import gather, rotary
from minisgl.kernel.decode import decode, decode_scratch
from minisgl.kernel.fp8 import dequantize, quantize, store_kv

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device"
    ),
]
# The reference computes in float32; the kernels convert queries and weights to float16.
TOLERANCE = 2e-3 if INTERPRETED else 1.5e-2


@pytest.fixture(autouse=True)
def exact_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch convert from and to e4m3 in Triton's interpreter.

    The interpreter's own conversion loses the carry of the mantissa, and NaN.
    """
    if not INTERPRETED:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    plain = interpreter._convert_float
    wide = {tl.float32: torch.float32, tl.float16: torch.float16}

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target == tl.float8e4nv:
            small = torch.from_numpy(data.view(np.float32).copy()).to(torch.float8_e4m3fn)
            return small.view(torch.uint8).numpy()
        if source == tl.float8e4nv:
            small = torch.from_numpy(data.view(np.uint8).copy()).view(torch.float8_e4m3fn)
            result = small.to(wide[target]).numpy()
            return result.view(f"uint{8 * result.itemsize}")
        return plain(data, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", convert)


def normal(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def error(out: Tensor, expected: Tensor) -> float:
    """Relative error in the Frobenius norm; NaN where the output holds one."""
    out, expected = out.double(), expected.double()
    return ((out - expected).norm() / expected.norm()).item()


def extreme(x: Tensor) -> Tensor:
    """Replace some vectors of x [..., D]: zeros, outliers of 1e4, and very small elements."""
    x = x.clone()
    vectors = x.flatten(0, -2)
    kinds = torch.arange(len(vectors), device=x.device) % 7
    vectors[kinds == 1] = 0
    vectors[kinds == 2, 5] = 1e4
    vectors[kinds == 3] *= 1e-6
    vectors[kinds == 4] *= 1e-39  # denormal in float32
    vectors[kinds == 5, 3] = -448.0
    return vectors.view_as(x)


def empty_pools(pages: int, page_size: int, kv_heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """Pools of keys and values, and their scales, all NaN."""
    pools = torch.full((2, pages, page_size, kv_heads, dim), torch.nan, device=DEVICE)
    scales = torch.full((pages, kv_heads, page_size, 2), torch.nan, device=DEVICE)
    return pools.to(torch.float8_e4m3fn), scales.bfloat16()


@pytest.mark.parametrize("normed", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim"), [(16, 8, 128), (5, 1, 64), (4, 2, 256), (6, 3, 96)]
)
def test_keys_and_values_are_rounded_when_they_are_stored(
    normed: bool, page_size: int, q_heads: int, kv_heads: int, head_dim: int
) -> None:
    from minisgl.kernel.triton import rotary as kernels

    tokens, pages = 29, 40
    qkv = extreme(normal(tokens, q_heads + 2 * kv_heads, head_dim)).flatten(1)
    weights = [normal(head_dim) if normed else None for _ in range(2)]
    angles = torch.rand(50, head_dim // 2, device=DEVICE) * 6.28
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.randint(0, 50, (tokens,), device=DEVICE, dtype=torch.int32)
    slots = torch.randperm(pages * page_size, device=DEVICE)[:tokens].int()
    common, sizes = (1e-6, cos_sin, positions, slots), (q_heads, kv_heads, head_dim)
    results = []
    for run in (rotary.qk_norm_rope_store, kernels.qk_norm_rope_store):
        pools, scales = empty_pools(pages, page_size, kv_heads, head_dim)
        q = run(qkv, *weights, *common, *pools, *sizes, scales)
        results.append((q, pools, scales))
    (expected_q, theirs, their_scales), (q, ours, our_scales) = results
    assert error(q, expected_q) < TOLERANCE
    assert torch.equal(our_scales.isnan(), their_scales.isnan())  # nothing else was written
    assert torch.equal(ours.float().isnan(), theirs.float().isnan())
    where = slots.long()
    pages_of, offsets = where // page_size, where % page_size
    stored = []
    for pools, scales in ((ours, our_scales), (theirs, their_scales)):
        both = scales[pages_of, :, offsets].unbind(-1)
        # As bytes, because torch does not index float8 on every device.
        found = pools.view(torch.uint8).flatten(1, 2)[:, where].view(torch.float8_e4m3fn)
        stored.append([dequantize(found[i], both[i], DTYPE) for i in range(2)])
    (keys, values), (their_keys, their_values) = stored
    assert torch.equal(values, their_values)
    # A different last bit of a key may change its rounding, by one step of e4m3 at most.
    assert error(keys, their_keys) < 1e-2
    raw = qkv.view(tokens, -1, head_dim)[:, -kv_heads:]
    assert torch.equal(values, dequantize(*quantize(raw), DTYPE))


@pytest.mark.parametrize("shape", [(8, 128), (2, 64), (5, 96)], ids=["8x128", "2x64", "5x96"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_copies_of_contexts_are_dequantised(page_size: int, shape: tuple[int, int]) -> None:
    from minisgl.kernel.triton import gather as kernels

    tokens, pages = 300, 600 // page_size + 1
    pools, scales = empty_pools(pages, page_size, *shape)
    used = torch.randperm(pages * page_size, device=DEVICE)[:tokens]
    store_kv(*pools, *extreme(normal(2, tokens, *shape)), used, scales)
    slots = torch.full((384,), -1, dtype=torch.int32, device=DEVICE)
    slots[40:340] = used.int()
    copies = torch.full((2, 2, 384, *shape), torch.nan, dtype=DTYPE, device=DEVICE)
    gather.gather_kv(*pools, slots, *copies[0], scales)
    kernels.gather_kv(*pools, slots, *copies[1], scales)
    assert torch.equal(copies[0], copies[1])
    assert not copies[1].isnan().any()


@pytest.mark.parametrize("kind", ["norm", "plain", "queries"])
@pytest.mark.parametrize(
    ("group", "dim"), [(1, 64), (2, 128), (3, 64), (5, 64), (8, 64), (16, 128), (2, 256)]
)
@pytest.mark.parametrize("contexts", [[1], [700], [3, 65, 64, 1, 200, 129, 63, 1]], ids=len)
@pytest.mark.parametrize(("padded", "page_size"), [(0, 4), (1, 16), (140, 1), (3, 128)])
def test_decode_reads_and_stores_fp8(
    padded: int, page_size: int, contexts: list[int], group: int, dim: int, kind: str
) -> None:
    """Pages without a request, and slots after the end of a context, are NaN."""
    from minisgl.kernel.triton import decode as kernels

    kv_heads, reqs = 2, len(contexts)
    pages = [-(-context // page_size) for context in contexts]
    order = torch.randperm(sum(pages) + 3, dtype=torch.int32)
    table = torch.full((reqs + 3, max(pages)), -1, dtype=torch.int32)
    rows = torch.randperm(reqs + 2)[:reqs].int()
    pools, scales = empty_pools(sum(pages) + 3, page_size, kv_heads, dim)
    for row, count, context in zip(rows.tolist(), pages, contexts, strict=True):
        table[row, :count], order = order[:count], order[count:]
        stored = context if kind == "queries" else context - 1
        each = torch.arange(stored)
        slots = (table[row, each // page_size] * page_size + each % page_size).to(DEVICE)
        store_kv(*pools, *extreme(normal(2, stored, kv_heads, dim)), slots, scales)
    start = torch.cat((torch.tensor(contexts).int() - 1, torch.zeros(padded, dtype=torch.int32)))
    rows = torch.cat((rows, torch.full((padded,), reqs + 2, dtype=torch.int32)))
    where = [tensor.to(DEVICE) for tensor in (table, rows, start, torch.ones_like(start))]
    q_heads = kv_heads * group
    scratch = decode_scratch(reqs + padded, q_heads, kv_heads, dim, torch.device(DEVICE))
    if INTERPRETED:
        parts = 14  # two for each of 7 programs
        scratch = scratch._replace(
            partial_outputs=torch.full((parts, *scratch.partial_outputs.shape[1:]), torch.nan),
            softmax_stats=torch.full((parts, *scratch.softmax_stats.shape[1:]), torch.nan),
        )
    heads = q_heads if kind == "queries" else q_heads + 2 * kv_heads
    qkv = normal(reqs + padded, 2 * heads * dim).chunk(2, 1)[1]
    weights = [normal(dim) if kind == "norm" else None for _ in range(2)]
    angles = torch.rand(max(contexts), dim // 2, device=DEVICE) * 6.28
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    norms = *weights, 1e-6, None if kind == "queries" else cos_sin
    expected = normal(reqs + padded, q_heads, dim)
    theirs, their_scales = pools.clone(), scales.clone()
    decode(qkv, *norms, *theirs, expected, *where, scratch, their_scales)
    for _ in range(2):
        ours, our_scales = pools.clone(), scales.clone()
        out = torch.full_like(expected, torch.nan)
        kernels.count_blocks(*where[1:], len(table) - 1, scratch, fp8=True)
        kernels.decode(qkv, *norms, *ours, out, *where, scratch, our_scales)
        assert error(out, expected) < TOLERANCE
        assert torch.equal(our_scales.isnan(), their_scales.isnan())  # nothing else was written
        assert torch.equal(ours.float().isnan(), theirs.float().isnan())
        assert error(ours.float().nan_to_num(), theirs.float().nan_to_num()) < 1e-2
        assert not scratch.semaphores.any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("part", ["key", "value"])
def test_a_value_that_is_not_finite_makes_the_output_nan(part: str, bad: float) -> None:
    """The sampler then reports the request's logits as not finite."""
    from minisgl.kernel.triton import decode as kernels

    kv_heads, group, dim = 1, 2, 64
    table = torch.tensor([[0, 1], [-1, -1]], dtype=torch.int32, device=DEVICE)
    pools, scales = empty_pools(2, 16, kv_heads, dim)
    kv = normal(2, 20, kv_heads, dim)
    kv[0 if part == "key" else 1, 7, 0, 9] = bad
    store_kv(*pools, *kv, torch.arange(20, device=DEVICE), scales)
    ints = [torch.tensor([x], dtype=torch.int32, device=DEVICE) for x in (0, 19, 1)]
    scratch = decode_scratch(1, group, kv_heads, dim, torch.device(DEVICE))
    out = torch.zeros(1, group, dim, dtype=DTYPE, device=DEVICE)
    kernels.count_blocks(*ints, 1, scratch, fp8=True)
    query = normal(1, group * dim)
    kernels.decode(query, None, None, 0.0, None, *pools, out, table, *ints, scratch, scales)
    assert out.isnan().any(-1).all()
