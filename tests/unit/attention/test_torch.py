"""The torch backend against plain attention in float64, over random page tables."""

import numpy as np
import pytest
import torch

from minisgl.attention.base import PLAIN, AttentionRule, AttentionStep
from minisgl.attention.registry import create_attention_backend
from minisgl.core import ConfigError
from minisgl.kernel.fp8 import dequantize, quantize, store_kv
from minisgl.kvcache.pool import KVPool, KVSpec, kv_page_bytes

CPU = torch.device("cpu")
Q_HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8
SPEC = KVSpec(KV_HEADS, HEAD_DIM, torch.float32)
FP8 = pytest.mark.parametrize("fp8", [False, True], ids=["float32", "fp8"])


def make_pool(page_size: int, num_pages: int = 600, fp8: bool = False) -> KVPool:
    spec = SPEC._replace(fp8=fp8)
    return KVPool(
        spec, layers=(0, 1), num_pages=num_pages // page_size, page_size=page_size, device=CPU
    )


def make_step(
    num_decode: int,
    rows: "np.ndarray[tuple[int], np.dtype[np.int32]]",
    start: list[int],
    lengths: list[int],
    table: "np.ndarray[tuple[int, int], np.dtype[np.int32]]",
) -> AttentionStep:
    firsts, counts = np.array(start, dtype=np.int32), np.array(lengths, dtype=np.int32)
    return AttentionStep(
        num_decode=num_decode,
        start=firsts,
        lengths=counts,
        device_rows=torch.from_numpy(rows),
        device_start=torch.from_numpy(firsts),
        device_lengths=torch.from_numpy(counts),
        page_table=torch.from_numpy(table),
    )


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: int,
    rule: AttentionRule = PLAIN,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query [Hq, D] over keys and values [C, Hkv, D] up to its position, in float64."""
    group = Q_HEADS // KV_HEADS
    first = 0 if rule.window is None else max(0, position + 1 - rule.window)
    out = []
    for head in range(Q_HEADS):
        keys, values = (x[first : position + 1, head // group].double() for x in (k, v))
        scores = keys @ q[head].double() / HEAD_DIM**0.5
        if rule.soft_cap is not None:
            scores = rule.soft_cap * (scores / rule.soft_cap).tanh()
        weights = scores.exp()
        total = weights.sum() + (0.0 if sinks is None else sinks[head].double().exp())
        out.append(weights / total @ values)
    return torch.stack(out).float()


RULES = [
    PLAIN,
    AttentionRule(window=1),
    AttentionRule(window=7),
    AttentionRule(soft_cap=0.7),
    AttentionRule(sinks=True),
    AttentionRule(window=16, soft_cap=2.0, sinks=True),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@FP8
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    ("num_decode", "start", "lengths"),
    [
        (1, [0], [1]),
        (4, [3, 99, 0, 16], [1, 1, 1, 1]),
        (0, [0, 0], [17, 1]),
        (0, [5, 32, 16], [3, 1, 20]),
        (2, [31, 4, 0, 13], [1, 1, 9, 6]),
        (3, [31, 4, 0], [4, 4, 4]),
        (2, [31, 4, 0, 13], [2, 2, 9, 6]),
    ],
    ids=["one", "decode", "prefill", "after-prefix", "mixed", "drafts", "mixed-drafts"],
)
def test_backend_equals_plain_attention(
    num_decode: int,
    start: list[int],
    lengths: list[int],
    page_size: int,
    fp8: bool,
    rule: AttentionRule,
) -> None:
    """Pages behind the window hold NaN, since another request may own them."""
    generator = torch.Generator().manual_seed(1)
    rng = np.random.default_rng(1)
    pool = make_pool(page_size, fp8=fp8)
    backend = create_attention_backend("torch", pool, Q_HEADS, [rule])
    sinks = torch.randn(Q_HEADS, generator=generator) if rule.sinks else None
    rows = rng.permutation(8)[: len(start)].astype(np.int32)
    table = np.full((8, 128 // page_size), pool.dummy_page, dtype=np.int32)
    order = rng.permutation(pool.num_pages).astype(np.int32)
    queries, contexts = [], []
    for row, first, length in zip(rows, start, lengths, strict=True):
        pages, order = np.split(order, [-(-(first + length) // page_size)])
        table[row, : len(pages)] = pages
        k, v = torch.randn(2, first + length, KV_HEADS, HEAD_DIM, generator=generator)
        positions = np.arange(first + length)
        own = torch.from_numpy(pages[positions // page_size] * page_size + positions % page_size)
        store_kv(*pool.layer(1), k, v, own, pool.scales(1))
        if fp8:
            k, v = (dequantize(*quantize(part), torch.float32) for part in (k, v))
        behind = 0 if rule.window is None else max(0, first - rule.window + 1) // page_size
        for part in pool.layer(1):
            part.view(torch.uint8)[pages[:behind].tolist()] = 0xFF
        queries.append(torch.randn(length, Q_HEADS, HEAD_DIM, generator=generator))
        contexts.append((k, v, first))
    q = torch.cat(queries)
    out = torch.full_like(q, torch.nan)
    backend.prepare(make_step(num_decode, rows, start, lengths, table)).forward(1, q, out, sinks)
    expected = [
        plain(q, k, v, first + i, rule, sinks)
        for query, (k, v, first) in zip(queries, contexts, strict=True)
        for i, q in enumerate(query)
    ]
    torch.testing.assert_close(out, torch.stack(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rule", [PLAIN, AttentionRule(window=300, sinks=True)], ids=str)
def test_long_chunk_is_cut_into_blocks(rule: AttentionRule) -> None:
    """A chunk with more queries than one block, after a prefix. Each block has its own mask."""
    generator = torch.Generator().manual_seed(2)
    pool = make_pool(16, num_pages=1600)
    first, length = 40, 1100
    table = np.arange(80, dtype=np.int32)[None]
    k, v = torch.randn(2, first + length, KV_HEADS, HEAD_DIM, generator=generator)
    pool.layer(0)[0].flatten(0, 1)[: first + length] = k
    pool.layer(0)[1].flatten(0, 1)[: first + length] = v
    step = make_step(0, np.zeros(1, dtype=np.int32), [first], [length], table)
    q = torch.randn(length, Q_HEADS, HEAD_DIM, generator=generator)
    out = torch.full_like(q, torch.nan)
    sinks = torch.randn(Q_HEADS, generator=generator) if rule.sinks else None
    create_attention_backend("auto", pool, Q_HEADS, [rule]).prepare(step).forward(0, q, out, sinks)
    for i in (0, 1, 1023, 1024, 1099):
        expected = plain(q[i], k, v, first + i, rule, sinks)
        torch.testing.assert_close(out[i], expected, atol=1e-5, rtol=1e-5)


def test_each_layer_follows_its_rule() -> None:
    """A model with layers of two rules, in a step with decode requests and a chunk."""
    generator = torch.Generator().manual_seed(3)
    pool = make_pool(4)
    start, lengths, rules = [9, 11], [1, 6], [AttentionRule(window=3), PLAIN]
    table = np.arange(10, dtype=np.int32).reshape(2, 5)
    k, v = torch.randn(2, 40, KV_HEADS, HEAD_DIM, generator=generator)
    for layer in range(2):
        for stored, part in zip(pool.layer(layer), (k, v), strict=True):
            stored.flatten(0, 1)[:40] = part
    step = make_step(1, np.arange(2, dtype=np.int32), start, lengths, table)
    attention = create_attention_backend("torch", pool, Q_HEADS, rules).prepare(step)
    q = torch.randn(7, Q_HEADS, HEAD_DIM, generator=generator)
    for layer, rule in enumerate(rules):
        out = torch.full_like(q, torch.nan)
        attention.forward(layer, q, out)
        expected = [plain(q[0], k, v, 9, rule)]
        expected += [plain(q[1 + i], k[20:], v[20:], 11 + i, rule) for i in range(6)]
        torch.testing.assert_close(out, torch.stack(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fast", "'fast' is not known; known: auto, flashinfer, triton, torch"),
        ("torch,flashinfer-fa3", "'flashinfer-fa3' cannot be used: it needs a CUDA device"),
        ("flashinfer", "'flashinfer' cannot be used: it needs a CUDA device, not cpu"),
        ("flashinfer,torch", "'flashinfer' cannot be used"),
    ],
)
def test_backend_that_cannot_be_used_is_refused(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        create_attention_backend(name, make_pool(4), Q_HEADS)


@FP8
def test_pool_size_is_the_size_of_its_pages(fp8: bool) -> None:
    pool = make_pool(4, num_pages=40, fp8=fp8)
    page_bytes = kv_page_bytes(pool.spec, 2, 4)
    assert pool.num_bytes == (pool.num_pages + 1) * page_bytes
    assert pool.dummy_slot == pool.num_pages * 4
