"""Decode attention under rules: windows, sinks and soft caps, compared with the torch backend.

Before a call, these are NaN: pages behind the windows, slots behind the ends of the contexts, slots
of new tokens, temporary memory and the output. With TRITON_INTERPRET=1 the kernel tests run on a
CPU.
"""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.attention.base import AttentionRule, AttentionStep, NormRope
from minisgl.attention.decode import BalancedDecode
from minisgl.attention.torch import TorchAttention
from minisgl.kernel.decode import decode_scratch
from minisgl.kernel.rotary import qk_norm_rope_store
from minisgl.kvcache.pool import KVPool
from tests.gpu.test_attention import FP8
from tests.gpu.test_drafts_attention import (
    KV_HEADS,
    LAST_KEYS_ALONE,
    ONE,
    SEVERAL,
    Inputs,
    Requests,
    make_scene,
    poisoned_scratch,
)
from tests.gpu.test_fp8_kv import DEVICE, INTERPRETED, error, normal
from tests.gpu.test_fp8_kv import exact_conversions as exact_conversions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device"
    ),
]
SINGLE = Requests([700, 3, 65, 64, 18, 1, 129, 128, 127], [1] * 9, padded=3, behind=3)
GPT_OSS = AttentionRule(window=128, sinks=True)
ALL = AttentionRule(window=37, soft_cap=5.0, sinks=True)


class Shape(NamedTuple):
    """queries: the largest number of new tokens of a request for which the kernel is compiled."""

    reqs: Requests
    queries: int
    group: int
    dim: int
    page: int


SHAPES = {
    "page-4": Shape(SINGLE, 1, 2, 64, 4),
    "page-1": Shape(SINGLE, 1, 5, 128, 1),
    "gpt-oss": Shape(SINGLE, 1, 8, 64, 16),
    "wide": Shape(SINGLE, 1, 2, 256, 16),
    "group-4": Shape(SINGLE, 1, 4, 256, 64),
    "d512": Shape(SINGLE, 1, 8, 512, 16),
    "d512-page-1": Shape(SINGLE, 1, 4, 512, 1),
    "d512-drafts": Shape(SEVERAL, 8, 4, 512, 64),
    "drafts": Shape(SEVERAL, 8, 8, 64, 16),
    "drafts-page-4": Shape(SEVERAL, 8, 1, 128, 4),
    "wide-drafts": Shape(ONE, 2, 2, 256, 16),
    "last-keys": Shape(LAST_KEYS_ALONE, 4, 2, 128, 16),
}
RULES = {
    "plain": AttentionRule(),
    "window-1": AttentionRule(window=1),
    "window-3": AttentionRule(window=3),
    "window-16": AttentionRule(window=16),
    "window-128": AttentionRule(window=128),
    "sinks": AttentionRule(sinks=True),
    "cap": AttentionRule(soft_cap=2.0),
    "gpt-oss": GPT_OSS,
    "all": ALL,
}
# Each case has a kernel of its own, and a kernel takes about a second to compile.
CASES = [
    f"{shape} {case}"
    for shape, cases in {
        "page-4": ["window-3 norm", "window-1 queries", "sinks plain", "cap norm", "all plain"],
        "page-1": ["window-16 plain", "all norm"],
        "gpt-oss": ["gpt-oss plain", "gpt-oss queries", "sinks plain", "window-3 norm"],
        "wide": ["window-3 norm", "window-128 norm", "cap norm", "all norm"],
        "group-4": ["window-16 norm", "all queries"],
        "d512": ["plain norm", "plain queries", "all plain"],
        "d512-page-1": ["plain norm", "window-16 queries"],
        "d512-drafts": ["plain norm", "all plain"],
        "drafts": ["gpt-oss plain", "window-1 norm", "sinks plain", "cap norm", "all queries"],
        "drafts-page-4": ["window-3 plain", "window-16 norm", "window-128 queries", "all norm"],
        "wide-drafts": ["window-128 norm", "all norm"],
        "last-keys": ["window-16 norm", "window-3 queries", "sinks norm"],
    }.items()
    for case in cases
]


def poison_behind(scene: Inputs, window: int | None) -> None:
    """Fill all pages before the first page of a request's window with NaN."""
    page = scene.pool.page_size
    for row, start in zip(scene.rows.tolist(), scene.start.tolist(), strict=True):
        behind = 0 if window is None else max(0, start + 1 - window) // page
        pages = scene.table[row, :behind].long()
        for part in (*scene.pool.layer(0), scene.pool.scales(0)):
            if part is not None:
                part.view(torch.uint8)[pages] = 0xFF


def oracle(
    scene: Inputs, rule: AttentionRule, sinks: Tensor | None, deltas: Tensor | None = None
) -> Tensor:
    """The torch backend's result for the new tokens, in float32.

    Stores their keys and values in the pool. deltas: as in kernel.decode.decode.
    """
    pool, real = scene.pool, scene.rows != len(scene.table) - 1
    rows, first, new = (x[real] for x in scene.where[1:])
    start, counts = first.cpu().numpy(), new.cpu().numpy()
    step = AttentionStep(0, start, counts, rows, first, new, scene.table)
    position = torch.from_numpy(
        np.concatenate([np.arange(a, a + n) for a, n in zip(start, counts, strict=True)])
    ).to(DEVICE)
    row, size = rows.repeat_interleave(new).long(), pool.page_size
    slots = scene.table[row, position // size] * size + position % size
    sizes = (scene.q_heads, KV_HEADS, pool.spec.head_dim)
    q_weight, k_weight, eps, cos_sin = scene.norms
    qkv = scene.qkv[: len(position)]
    if cos_sin is None:
        q = qkv.view(len(qkv), *sizes[::2])
    else:
        turns = position
        if deltas is not None:
            turns = position + deltas[real].repeat_interleave(new)
        places = (cos_sin, turns, slots, *pool.layer(0))
        q = qk_norm_rope_store(qkv, q_weight, k_weight, eps, *places, *sizes, pool.scales(0))
    spec, pages = pool.spec._replace(dtype=torch.float32), pool.num_pages
    wide = KVPool(spec, layers=(0,), num_pages=pages, page_size=size, device=pool.device)
    parts = zip((*wide.layer(0), wide.scales(0)), (*pool.layer(0), pool.scales(0)), strict=True)
    for target, source in parts:
        if target is not None and source is not None:
            target.copy_(source)
    q = q.float().contiguous()
    out = torch.full_like(q, torch.nan)
    wide_sinks = None if sinks is None else sinks.float()
    TorchAttention(wide, scene.q_heads, rule).prepare(step).forward(0, q, out, wide_sinks)
    return out


@FP8
@pytest.mark.parametrize("case", CASES)
def test_rules(case: str, fp8: bool) -> None:
    """Two calls with one scratch agree with the torch backend, in outputs and in the pool."""
    from minisgl.kernel.triton import decode as kernels

    name, rule_name, kind = case.split()
    (reqs, queries, group, dim, page), rule = SHAPES[name], RULES[rule_name]
    scene = make_scene(reqs, group, dim, page, kind, fp8)
    poison_behind(scene, rule.window)
    ours = scene.copy_of_pool()
    sinks = normal(scene.q_heads) * 3 if rule.sinks else None
    # Requests with images rotate by other positions.
    deltas = -(scene.start * 2 // 3) if kind == "norm" else None
    expected = oracle(scene, rule, sinks, deltas)
    theirs = scene.copy_of_pool()
    scratch = poisoned_scratch(scene, queries)
    real = len(expected)
    for _ in range(2):
        out = normal(len(scene.qkv), scene.q_heads, dim).fill_(torch.nan)
        step = (*scene.where[1:], len(scene.table) - 1)
        kernels.count_blocks(*step, scratch, fp8, queries, rule.window)
        inputs = (scene.qkv, *scene.norms, *ours[:2], out, *scene.where, scratch, ours[2], queries)
        kernels.decode(*inputs, sinks, rule.window, rule.soft_cap, deltas)
        exact = INTERPRETED and not fp8
        assert error(out[:real], expected) < (1e-5 if exact else 2e-3 if INTERPRETED else 1.5e-2)
        assert not out[real:].any()
        for mine, other in zip(ours, theirs, strict=True):
            if mine is not None and other is not None:
                assert torch.equal(mine.float().isnan(), other.float().isnan())
                mine, other = (x.float().nan_to_num() for x in (mine, other))
                assert error(mine, other) < (1e-5 if exact else 1e-2)
        assert not scratch.semaphores.any()


@FP8
@pytest.mark.parametrize("window", [None, 1, 16, 100, 5000])
@pytest.mark.parametrize("queries", [1, 8])
def test_only_keys_of_windows_are_counted_as_work(
    queries: int, window: int | None, fp8: bool
) -> None:
    from minisgl.kernel.triton.decode_blocks import BLOCK, FP8_BLOCK, LEAD, count_blocks

    reqs = SINGLE if queries == 1 else SEVERAL
    scene = make_scene(reqs, 2, 64, 16, "queries", fp8)
    scratch = poisoned_scratch(scene, queries)
    dummy_row = len(scene.table) - 1
    count_blocks(*scene.where[1:], dummy_row, scratch, fp8, queries, window)
    size, total, expected = FP8_BLOCK if fp8 else BLOCK, 0, [0]
    for context, new in zip(reqs.contexts, reqs.new, strict=True):
        first = 0 if window is None else max(0, context - new + 1 - window)
        total += LEAD + len({key // size for key in range(first, context)})
        expected.append(total)
    expected += [total] * reqs.padded
    assert scratch.first.tolist() == expected


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@FP8
@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize("size", [1, 24, 280], ids=["one", "some", "many"])
@pytest.mark.parametrize(
    ("group", "dim", "rule"),
    [
        (8, 64, GPT_OSS),
        (8, 64, AttentionRule(sinks=True)),
        (2, 256, AttentionRule(window=1024)),
        (4, 256, AttentionRule(window=512)),
        (2, 128, ALL),
        (8, 512, AttentionRule()),
    ],
    ids=["gpt-oss", "gpt-oss-full", "gemma-3-12b", "gemma-3-1b", "all", "gemma-4"],
)
def test_captured_decode(
    group: int, dim: int, size: int, width: int, rule: AttentionRule, fp8: bool
) -> None:
    """A graph that is captured for padded requests gives correct results for real ones."""
    rng = np.random.default_rng(size)
    contexts = rng.integers(width, 1200, size).tolist()
    contexts[0] = 9000  # several programs share this context, and one merges their parts
    scene = make_scene(Requests(contexts, [width] * size), group, dim, 16, "norm", fp8)
    poison_behind(scene, rule.window)
    rows = scene.rows.clone()
    sinks = normal(scene.q_heads) if rule.sinks else None
    lengths, starts = (x.cpu().numpy() for x in (scene.lengths, scene.start))
    step = AttentionStep(size, starts, lengths, *scene.where[1:], scene.table)
    sizes = (size, scene.q_heads, KV_HEADS, dim, torch.device(DEVICE))
    decode = BalancedDecode(scene.pool, step, decode_scratch(*sizes, width), rule)
    out = normal(len(scene.qkv), scene.q_heads, dim)
    q_weight, k_weight, eps, cos_sin = scene.norms
    assert cos_sin is not None
    heads = NormRope(q_weight, k_weight, eps, cos_sin)

    def run() -> None:
        decode.compute_metadata()
        decode.attend(0, scene.qkv, heads, out, sinks)

    scene.rows.fill_(len(scene.table) - 1)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        run()
        graph.capture_end()
        scene.rows.copy_(rows)
        for _ in range(2):
            out.fill_(torch.nan)
            graph.replay()
        stream.synchronize()
    expected = oracle(scene, rule, sinks)
    assert error(out, expected) < 1.5e-2
