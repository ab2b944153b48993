"""FlashInfer against attention in float64, eager and captured, over scattered pages."""

import numpy as np
import pytest
import torch

from minisgl.attention.base import AttentionStep, FusedAttention, InTurn, NormRope
from minisgl.attention.flashinfer import ContiguousAttention
from minisgl.attention.registry import create_attention_backend
from minisgl.build.flashinfer_jit import AttentionKernel, compile_modules
from minisgl.kernel.fp8 import dequantize, quantize, store_kv
from minisgl.kvcache.pool import KVPool, KVSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DIM = 128
FP8 = pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
ROWS = 300


class Scene:
    """A pool with random keys and values for each request, and NaN in all pages without a request.

    contexts: the tokens of each request. fp8: the pool is FP8, and the requests' keys and values
    are the rounded ones.
    """

    def __init__(
        self, page_size: int, group: int, contexts: list[int], seed: int, fp8: bool = False
    ) -> None:
        self.kv_heads, self.q_heads = 2, 2 * group
        rng = np.random.default_rng(seed)
        device = torch.device("cuda")
        need = [-(-c // page_size) for c in contexts]
        self.pool = KVPool(
            KVSpec(self.kv_heads, DIM, torch.bfloat16, fp8),
            layers=(0, 1),
            num_pages=sum(need) + 7,
            page_size=page_size,
            device=device,
        )
        table = np.full((ROWS + 1, max(need)), self.pool.dummy_page, dtype=np.int32)
        order = rng.permutation(self.pool.num_pages).astype(np.int32)
        self.rows = rng.permutation(ROWS)[: len(contexts)].astype(np.int32)
        keys, values = self.pool.layer(1)
        scales = self.pool.scales(1)
        for part in (keys, values):
            part.view(torch.uint8).fill_(0xFF)  # NaN in bfloat16 and in e4m3
        if scales is not None:
            scales.fill_(torch.nan)
        self.pool.clear_dummy()
        self.kv = []
        for row, context, count in zip(self.rows, contexts, need, strict=True):
            pages, order = order[:count], order[count:]
            table[row, :count] = pages
            where = torch.arange(context, device=device)
            slots = torch.from_numpy(pages).to(device)[where // page_size] * page_size
            slots = slots + where % page_size
            k, v = torch.randn(2, context, self.kv_heads, DIM, device=device).bfloat16()
            store_kv(keys, values, k, v, slots, scales)
            self.kv.append((self.rounded(k), self.rounded(v)))
        self.table = torch.from_numpy(table).to(device)
        self.backend = create_attention_backend("auto", self.pool, self.q_heads)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        return dequantize(*quantize(x), x.dtype) if self.pool.spec.fp8 else x

    def step(self, num_decode: int, start: list[int], lengths: list[int]) -> AttentionStep:
        first, count = np.array(start, dtype=np.int32), np.array(lengths, dtype=np.int32)
        return AttentionStep(
            num_decode=num_decode,
            start=first,
            lengths=count,
            device_rows=torch.from_numpy(self.rows).cuda(),
            device_start=torch.from_numpy(first).cuda(),
            device_lengths=torch.from_numpy(count).cuda(),
            page_table=self.table,
        )

    def expected(self, q: torch.Tensor, start: list[int], lengths: list[int]) -> torch.Tensor:
        parts, offset = [], 0
        for (k, v), first, length in zip(self.kv, start, lengths, strict=True):
            query = q[offset : offset + length].double().view(length, self.kv_heads, -1, DIM)
            offset += length
            scores = torch.einsum("qhgd,khd->hgqk", query, k.double()) / DIM**0.5
            at = first + torch.arange(length, device=q.device)
            hidden = torch.arange(len(k), device=q.device) > at.unsqueeze(1)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            parts.append(torch.einsum("hgqk,khd->qhgd", weights, v.double()).flatten(1, 2))
        return torch.cat(parts)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@FP8
@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
@pytest.mark.parametrize("group", [2, 5])
@pytest.mark.parametrize("chunks", [(200, 1, 130), (40, 1, 87)], ids=["many", "few"])
def test_mixed_steps(page_size: int, group: int, chunks: tuple[int, ...], fp8: bool) -> None:
    start = [0, 700, 15, 16, 0, 33, 300]
    lengths = [1, 1, 1, 1, *chunks]
    contexts = [a + b for a, b in zip(start, lengths, strict=True)]
    scene = Scene(page_size, group, contexts, seed=page_size, fp8=fp8)
    q = torch.randn(sum(lengths), scene.q_heads, DIM, device="cuda").bfloat16()
    # On Hopper, the first step copies its contexts. The second has too few queries for a copy.
    for _ in range(2):
        out = torch.full_like(q, torch.nan)
        scene.backend.prepare(scene.step(4, start, lengths)).forward(1, q, out)
        assert error(out, scene.expected(q, start, lengths)) < 5e-3


@pytest.fixture(scope="module")
def fa3_is_compiled() -> None:
    """Until the module is compiled, prompts run on fa2 and make no copy."""
    if torch.cuda.get_device_capability() == (9, 0):
        compile_modules([AttentionKernel("fa3", torch.bfloat16, DIM)])


@pytest.mark.usefixtures("fa3_is_compiled")
@FP8
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("group", [2, 5])
@pytest.mark.parametrize(
    ("num_decode", "start", "lengths", "copied"),
    [
        (2, [7, 3, 0], [1, 1, 5200], True),
        (0, [0, 5, 0, 128], [300, 500, 128, 5500], True),
        (1, [50, 1500, 0, 3000], [1, 4000, 1, 1500], True),
        (1, [0, 18000], [1, 200], False),  # too few queries for so long a context
        (0, [6000] * 3, [1000] * 3, False),  # the copy has no room for 21,000 tokens
    ],
    ids=["whole", "several", "prefixes", "few", "too-long"],
)
def test_long_chunks(
    page_size: int,
    group: int,
    num_decode: int,
    start: list[int],
    lengths: list[int],
    copied: bool,
    fp8: bool,
) -> None:
    """The results are correct in two steps that share the memory of the copy.

    An FP8 pool is always copied, in several groups if the copy has no room for all contexts.

    NaN in the values of the last request then reaches no output of the requests before it.
    """
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("fa3 is for Hopper")
    contexts = [a + b for a, b in zip(start, lengths, strict=True)]
    scene = Scene(page_size, group, contexts, seed=page_size, fp8=fp8)
    q = torch.randn(sum(lengths), scene.q_heads, DIM, device="cuda").bfloat16()
    step = scene.step(num_decode, start, lengths)
    # The first step always makes the copy if its contexts fit.
    scene.backend.prepare(step.part(num_decode, len(start)))
    prompts = scene.backend.prepare(step.part(num_decode, len(start)))
    assert isinstance(prompts, ContiguousAttention) == (copied and not fp8)
    if isinstance(prompts, InTurn):
        assert (len(prompts.parts) > 1) == (sum(contexts[num_decode:]) > 18300)
    for _ in range(2):
        out = torch.full_like(q, torch.nan)
        scene.backend.prepare(step).forward(1, q, out)
        assert error(out, scene.expected(q, start, lengths)) < 5e-3
        q.normal_()
    last = contexts[-1]
    where = torch.arange(last, device="cuda")
    pages = scene.table[int(scene.rows[-1]), where // page_size].long()
    scene.pool.layer(1)[1].view(torch.uint8)[pages, where % page_size] = 0xFF
    out = torch.zeros_like(q)
    scene.backend.prepare(step).forward(1, q, out)
    assert out[-lengths[-1] :].isnan().all()
    assert not out[: -lengths[-1]].isnan().any()


@FP8
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("size", [1, 24, 280], ids=["one", "some", "many"])
@pytest.mark.parametrize("group", [1, 2, 5, 8])
def test_captured_decode_follows_its_inputs(
    page_size: int, size: int, group: int, fp8: bool
) -> None:
    """A graph captured for padded requests gives correct results for real ones, also for fewer.

    minisgl's kernel takes the new token's key and value from qkv. FlashInfer's kernel, which runs
    for many requests with large groups of query heads, reads them from the pool.
    """
    rng = np.random.default_rng(size)
    longest = rng.integers(2, 1200, size).tolist()
    longest[0] = 9000  # several programs share this context, and one merges their parts
    scene = Scene(page_size, group, longest, seed=size, fp8=fp8)
    step = scene.step(size, [0] * size, [1] * size)
    rows = step.device_rows.clone()
    step.device_rows.fill_(ROWS)
    heads, kv_heads = scene.q_heads, scene.kv_heads
    qkv = torch.randn(size, (heads + 2 * kv_heads) * DIM, device="cuda").bfloat16()
    out = torch.full((size, heads, DIM), torch.nan, device="cuda").bfloat16()
    unturned = torch.tensor([1.0, 0.0], device="cuda").repeat_interleave(DIM // 2)
    norms = NormRope(None, None, 0.0, unturned.expand(9000, DIM).contiguous())
    q, k, v = qkv.view(size, -1, DIM).split((heads, kv_heads, kv_heads), dim=1)
    queries = torch.empty_like(out)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        captured = scene.backend.decode_graph(size, step)
        assert captured is not None
        fused = isinstance(captured, FusedAttention)
        assert fused == (size * kv_heads < 500 or group <= 2 or fp8)

        def run() -> None:
            captured.compute_metadata()
            if isinstance(captured, FusedAttention):
                captured.attend(1, qkv, norms, out)
            else:
                captured.forward(1, queries, out)

        run()
        run()
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        graph.capture_begin()
        run()
        graph.capture_end()
        for cut, real in ((1, size), (2, size), (3, size // 2 + 1)):
            start = [max(length // cut, 1) - 1 for length in longest]
            host = np.array(start, dtype=np.int32)
            step.device_start.copy_(torch.from_numpy(host))
            step.device_rows[:real].copy_(rows[:real])
            step.device_rows[real:] = ROWS
            qkv.normal_()
            out.fill_(torch.nan)
            queries.copy_(q)
            if not fused:
                at = torch.from_numpy(host).cuda()[:real].long()
                pages = scene.table[rows[:real].long(), at // page_size].long()
                for pool, new in zip(scene.pool.layer(1), (k, v), strict=True):
                    pool[pages, at % page_size] = new[:real]
            graph.replay()
            stream.synchronize()
            scene.kv = [
                (torch.cat((keys[:at], key[None])), torch.cat((values[:at], value[None])))
                for (keys, values), at, key, value in zip(
                    scene.kv, start, scene.rounded(k), scene.rounded(v), strict=True
                )
            ][:real]
            start = start[:real]
            expected = scene.expected(q[:real], start, [1] * real)
            assert error(out[:real], expected) < 5e-3
            assert not fused or not out[real:].any()
