"""Decode attention of requests with several new tokens, as in steps with drafts.

Before a call, the slots of new tokens, unused pages, temporary memory and the output are NaN. With
TRITON_INTERPRET=1 the kernel tests run on a CPU.
"""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.attention.base import AttentionStep, FusedAttention, NormRope
from minisgl.attention.torch import TorchAttention
from minisgl.kernel.decode import DecodeScratch, decode, decode_scratch, fewest_warps
from minisgl.kernel.fp8 import store_kv
from minisgl.kernel.rotary import qk_norm_rope_store
from minisgl.kvcache.pool import KVPool, KVSpec
from tests.gpu.test_attention import DIM, FP8, ROWS, Scene
from tests.gpu.test_fp8_kv import DEVICE, DTYPE, INTERPRETED, error, extreme, normal
from tests.gpu.test_fp8_kv import exact_conversions as exact_conversions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device"
    ),
]
KV_HEADS = 2


class Requests(NamedTuple):
    """contexts and new: tokens of each request, and how many of them are new.

    behind: tokens after those of the requests. They belong to the padded requests.
    """

    contexts: list[int]
    new: list[int]
    padded: int = 0
    behind: int = 0


SEVERAL = Requests([700, 3, 65, 64, 18, 1, 129], [3, 2, 1, 8, 5, 1, 4], padded=3, behind=5)
EACH_FOUR = Requests([17, 4, 66, 200], [4, 4, 4, 4])
ONE = Requests([300], [2], padded=140, behind=1)
# A program begins at keys that the first new token may not attend to.
LAST_KEYS_ALONE = Requests([66, 34, 177], [4, 4, 4])


class Inputs(NamedTuple):
    """The inputs of one call. The last page-table row is that of padding."""

    pool: KVPool
    table: Tensor
    rows: Tensor
    start: Tensor
    lengths: Tensor
    qkv: Tensor
    norms: tuple[Tensor | None, Tensor | None, float, Tensor | None]
    q_heads: int

    @property
    def where(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.table, self.rows, self.start, self.lengths

    def copy_of_pool(self) -> tuple[Tensor, Tensor, Tensor | None]:
        scales = self.pool.scales(0)
        keys, values = self.pool.layer(0)
        return keys.clone(), values.clone(), None if scales is None else scales.clone()


def make_scene(
    reqs: Requests, group: int, dim: int, page_size: int, kind: str, fp8: bool
) -> Inputs:
    count, device = len(reqs.contexts), torch.device(DEVICE)
    pages = [-(-context // page_size) for context in reqs.contexts]
    spec = KVSpec(KV_HEADS, dim, DTYPE, fp8)
    pool = KVPool(spec, layers=(0,), num_pages=sum(pages), page_size=page_size, device=device)
    keys, values = pool.layer(0)
    scales = pool.scales(0)
    for part in (keys, values):
        part.view(torch.uint8).fill_(0xFF)  # NaN in every type
    if scales is not None:
        scales.fill_(torch.nan)
    order = torch.randperm(sum(pages), dtype=torch.int32)
    table = torch.full((count + 3, max(pages)), -1, dtype=torch.int32)
    rows = torch.randperm(count + 2)[:count].int()
    sizes = zip(rows.tolist(), pages, reqs.contexts, reqs.new, strict=True)
    for row, used, context, new in sizes:
        table[row, :used], order = order[:used], order[used:]
        each = torch.arange(context if kind == "queries" else context - new)
        slots = (table[row, each // page_size] * page_size + each % page_size).to(device)
        kv = normal(2, len(each), KV_HEADS, dim)
        store_kv(keys, values, *(extreme(kv) if fp8 else kv), slots, scales)
    new = torch.tensor(reqs.new + [1] * reqs.padded).int()
    start = torch.tensor(reqs.contexts + [1] * reqs.padded).int() - new
    rows = torch.cat((rows, torch.full((reqs.padded,), count + 2, dtype=torch.int32)))
    q_heads = KV_HEADS * group
    heads = q_heads if kind == "queries" else q_heads + 2 * KV_HEADS
    qkv = normal(sum(reqs.new) + reqs.behind, 2 * heads * dim).chunk(2, 1)[1]
    weights = [normal(dim) if kind == "norm" else None for _ in range(2)]
    angles = torch.rand(max(reqs.contexts), dim // 2, device=device) * 6.28
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    norms = (weights[0], weights[1], 1e-6, None if kind == "queries" else cos_sin)
    steps = (x.to(device) for x in (table, rows, start, new))
    return Inputs(pool, *steps, qkv, norms, q_heads)


def poisoned_scratch(scene: Inputs, queries: int) -> DecodeScratch:
    """Scratch for 7 programs in the interpreter, so that they share contexts."""
    dim = scene.pool.spec.head_dim
    sizes = len(scene.rows), scene.q_heads, KV_HEADS, dim, torch.device(DEVICE)
    scratch = decode_scratch(*sizes, queries)
    scratch.first.fill_(-7)
    scratch.tokens.fill_(-7)
    scratch.partial_outputs.fill_(torch.nan)
    scratch.softmax_stats.fill_(torch.nan)
    if INTERPRETED:
        from minisgl.kernel.triton.decode_blocks import program_warps

        warps = program_warps(
            len(scene.rows), KV_HEADS, scene.q_heads // KV_HEADS, dim, True, queries
        )
        slots = 14 * warps // fewest_warps(dim)
        parts = scratch.partial_outputs[:1].repeat(slots, 1, 1)
        stats = scratch.softmax_stats[:1].repeat(slots, 1, 1)
        scratch = scratch._replace(partial_outputs=parts, softmax_stats=stats)
    return scratch


@FP8
@pytest.mark.parametrize("kind", ["norm", "plain", "queries"])
@pytest.mark.parametrize(
    ("reqs", "queries", "group", "dim", "page_size"),
    [
        (SEVERAL, 8, 2, 64, 4),
        (SEVERAL, 8, 5, 64, 16),
        (SEVERAL, 8, 1, 128, 1),
        (EACH_FOUR, 4, 4, 128, 16),
        (EACH_FOUR, 4, 3, 64, 128),
        (EACH_FOUR, 8, 16, 64, 16),
        (ONE, 2, 8, 64, 64),
        (ONE, 2, 2, 256, 16),
        (ONE, 2, 8, 512, 16),
        (SEVERAL, 8, 2, 512, 1),
        (SEVERAL, 8, 8, 512, 16),
        (EACH_FOUR, 4, 5, 512, 64),
        (LAST_KEYS_ALONE, 4, 2, 128, 16),
        (LAST_KEYS_ALONE, 8, 5, 64, 1),
    ],
    ids=lambda value: f"{len(value.new)}reqs" if isinstance(value, Requests) else str(value),
)
def test_several_new_tokens(
    reqs: Requests, queries: int, group: int, dim: int, page_size: int, kind: str, fp8: bool
) -> None:
    """Two calls with one scratch agree with the reference, in outputs and in the pool."""
    from minisgl.kernel.triton import decode as kernels
    from minisgl.kernel.triton.decode_tiles import HIDDEN_SCORE

    scene = make_scene(reqs, group, dim, page_size, kind, fp8)
    shape = (len(scene.qkv), scene.q_heads, dim)
    expected, theirs = normal(*shape), scene.copy_of_pool()
    scratch = poisoned_scratch(scene, queries)
    decode(scene.qkv, *scene.norms, *theirs[:2], expected, *scene.where, scratch, theirs[2])
    for _ in range(2):
        ours, out = scene.copy_of_pool(), torch.full_like(expected, torch.nan)
        step = scene.where[1:]
        kernels.count_blocks(*step, len(scene.table) - 1, scratch, fp8, queries)
        call = (scene.qkv, *scene.norms, *ours[:2], out, *scene.where, scratch, ours[2], queries)
        kernels.decode(*call)
        exact = INTERPRETED and not fp8
        assert error(out, expected) < (1e-5 if exact else 2e-3 if INTERPRETED else 1.5e-2)
        largest_scores, weights = scratch.softmax_stats.unbind(1)
        unseen = largest_scores == HIDDEN_SCORE.value
        assert weights[unseen].isfinite().all()
        assert reqs is not LAST_KEYS_ALONE or unseen.any()
        assert not out[sum(reqs.new) :].any()
        for mine, other in zip(ours, theirs, strict=True):
            if mine is not None and other is not None:
                assert torch.equal(mine.float().isnan(), other.float().isnan())
                mine, other = (x.float().nan_to_num() for x in (mine, other))
                assert error(mine, other) < (1e-5 if exact else 1e-2)
        assert not scratch.semaphores.any()


@pytest.mark.parametrize("reqs", [SEVERAL, EACH_FOUR], ids=["several", "four"])
def test_outputs_are_those_of_the_torch_backend(reqs: Requests) -> None:
    """The torch backend computes the new tokens of a request as a prefill chunk."""
    from minisgl.kernel.triton import decode as kernels

    reqs = reqs._replace(padded=0, behind=0)
    scene = make_scene(reqs, 4, 64, 16, "norm", fp8=False)
    keys, values, _ = scene.copy_of_pool()
    scratch, out = poisoned_scratch(scene, 8), normal(len(scene.qkv), scene.q_heads, 64)
    kernels.count_blocks(*scene.where[1:], len(scene.table) - 1, scratch, False, 8)
    kernels.decode(scene.qkv, *scene.norms, keys, values, out, *scene.where, scratch, None, 8)
    start, new = (x.cpu().numpy() for x in (scene.start, scene.lengths))
    step = AttentionStep(0, start, new, *scene.where[1:], scene.table)
    rows = scene.rows.repeat_interleave(scene.lengths).long()
    position = torch.cat(
        [torch.arange(first, first + count) for first, count in zip(start, new, strict=True)]
    ).to(DEVICE)
    slots = scene.table[rows, position // 16] * 16 + position % 16
    q_weight, k_weight, eps, cos_sin = scene.norms
    assert cos_sin is not None
    places = (cos_sin, position, slots, *scene.pool.layer(0))
    q = qk_norm_rope_store(scene.qkv, q_weight, k_weight, eps, *places, scene.q_heads, KV_HEADS, 64)
    expected = torch.full_like(out, torch.nan)
    TorchAttention(scene.pool, scene.q_heads).prepare(step).forward(0, q, expected)
    assert error(out, expected) < (1e-5 if INTERPRETED else 1.5e-2)


@FP8
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("size", [1, 24, 280], ids=["one", "some", "many"])
@pytest.mark.parametrize("group", [2, 5, 8])
def test_captured_decode_of_several_tokens(group: int, size: int, width: int, fp8: bool) -> None:
    """A graph captured for padded requests gives correct results for real ones, also for fewer.

    The same backend then runs the step eagerly, with the same results, and a step with one token
    for each request.
    """
    rng = np.random.default_rng(size)
    longest = rng.integers(width, 1200, size).tolist()
    longest[0] = 9000  # several programs share this context, and one merges their parts
    scene = Scene(16, group, longest, seed=size, fp8=fp8)
    step = scene.step(size, [0] * size, [width] * size)
    rows = step.device_rows.clone()
    step.device_rows.fill_(ROWS)
    heads, kv_heads = scene.q_heads, scene.kv_heads
    tokens = size * width
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * DIM, device="cuda").bfloat16()
    out = torch.full((tokens, heads, DIM), torch.nan, device="cuda").bfloat16()
    unturned = torch.tensor([1.0, 0.0], device="cuda").repeat_interleave(DIM // 2)
    norms = NormRope(None, None, 0.0, unturned.expand(9000, DIM).contiguous())
    q, k, v = qkv.view(tokens, -1, DIM).split((heads, kv_heads, kv_heads), dim=1)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        captured = scene.backend.decode_graph(size, step)
        assert captured is not None
        assert isinstance(captured, FusedAttention)

        def run() -> None:
            captured.compute_metadata()
            captured.attend(1, qkv, norms, out)

        run()
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        graph.capture_begin()
        run()
        graph.capture_end()
        for cut, real in ((1, size), (2, size), (3, size // 2 + 1)):
            start = [max(length // cut, width) - width for length in longest]
            step.device_start.copy_(torch.tensor(start, dtype=torch.int32))
            step.device_rows[:real].copy_(rows[:real])
            step.device_rows[real:] = ROWS
            qkv.normal_()
            out.fill_(torch.nan)
            graph.replay()
            stream.synchronize()
            new_keys, new_values = (
                scene.rounded(x).view(size, width, kv_heads, DIM) for x in (k, v)
            )
            scene.kv = [
                (torch.cat((keys[:at], key)), torch.cat((values[:at], value)))
                for (keys, values), at, key, value in zip(
                    scene.kv, start, new_keys, new_values, strict=True
                )
            ][:real]
            start, used = start[:real], real * width
            expected = scene.expected(q[:used], start, [width] * real)
            assert error(out[:used], expected) < 5e-3
            assert not out[used:].any()
    stream.synchronize()
    scene.rows = scene.rows[:real]
    eager = torch.full_like(out[:used], torch.nan)
    step = scene.step(real, start, [width] * real)
    scene.backend.prepare(step).forward(1, q[:used].contiguous(), eager)
    assert error(eager, expected) < 5e-3
    last = [at + width - 1 for at in start]
    query, single = q[width - 1 : used : width].contiguous(), eager[:real]
    scene.backend.prepare(scene.step(real, last, [1] * real)).forward(1, query, single)
    assert error(single, expected[width - 1 :: width]) < 5e-3
