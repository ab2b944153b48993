"""FlashInfer's prefill with windows, soft caps and sinks, against the torch backend in float32.

Pages behind a window hold NaN, and so does the page that their stale entries in the page table
name: another request may own such a page. FlashInfer compiles each module once; `-k d64` runs the
cases of one head size.
"""

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.attention.base import (
    AttentionBackend,
    AttentionNeeds,
    AttentionRule,
    AttentionStep,
    InTurn,
    StepAttention,
)
from minisgl.attention.flashinfer import ContiguousAttention
from minisgl.attention.registry import attention_kernels, create_attention_backend
from minisgl.build import compile_missing
from minisgl.kernel import first_pages, store_kv
from minisgl.kernel.fp8 import dequantize, quantize
from minisgl.kvcache.pool import KVPool, KVSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FP8 = pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
CUDA = torch.device("cuda")
KV_HEADS, ROWS = 2, 40
# Head size, query heads per KV head and rule: gpt-oss, OLMo 3 and EXAONE 4, Gemma 3, Gemma 2.
CASES = {
    "d64-window-sinks": (64, 8, AttentionRule(window=128, sinks=True)),
    "d64-wide-sinks": (64, 8, AttentionRule(window=1000, sinks=True)),
    "d64-sinks": (64, 8, AttentionRule(sinks=True)),
    "d128-window": (128, 5, AttentionRule(window=4096)),
    "d128-narrow": (128, 1, AttentionRule(window=1)),
    "d256-window": (256, 2, AttentionRule(window=1024)),
    "d256-window-cap": (256, 2, AttentionRule(window=300, soft_cap=5.0)),
    "d256-cap": (256, 2, AttentionRule(soft_cap=5.0)),
}
NAMES = list(CASES)
CASE = pytest.mark.parametrize("case", CASES)
DECODE = pytest.mark.parametrize("name", ["flashinfer", "flashinfer,torch"])


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=CUDA)


class Scene:
    """Pools of NaN for one rule, one with the keys in float32, and pages for several requests.

    reqs: the tokens of each request that precede a step, and those of the step. layer: the only
    layer of the pools.
    """

    def __init__(
        self, case: str, page_size: int, reqs: list[tuple[int, int]], fp8: bool, layer: int = 0
    ) -> None:
        dim, group, self.rule = CASES[case]
        self.layer = layer
        torch.manual_seed(len(reqs) + page_size)
        rng = np.random.default_rng(page_size)
        self.q_heads, self.page_size = group * KV_HEADS, page_size
        columns = max(-(-(start + length) // page_size) for start, length in reqs)
        count = columns * len(reqs)
        self.pools = [
            KVPool(spec, layers=(layer,), num_pages=count + 1, page_size=page_size, device=CUDA)
            for spec in (
                KVSpec(KV_HEADS, dim, torch.bfloat16, fp8),
                KVSpec(KV_HEADS, dim, torch.float32),
            )
        ]
        for pool in self.pools:
            self.forget(torch.arange(count + 1, device=CUDA), pool)
            pool.clear_dummy()
        order = torch.from_numpy(rng.permutation(count).astype(np.int32)).to(CUDA)
        self.stale = count
        self.table = torch.full((ROWS + 1, columns), self.stale, dtype=torch.int32, device=CUDA)
        self.rows = rng.permutation(ROWS)[: len(reqs)].tolist()
        self.own = dict(zip(self.rows, order.view(-1, columns), strict=True))
        self.sinks = None
        if self.rule.sinks:
            self.sinks = (3 * torch.randn(self.q_heads, device=CUDA)).bfloat16()

    def forget(self, pages: Tensor, pool: KVPool) -> None:
        scales = pool.scales(self.layer)
        for part in pool.layer(self.layer):
            part.view(torch.uint8)[pages.long()] = 0xFF  # NaN
        if scales is not None:
            scales[pages.long()] = torch.nan

    def store(self, row: int, first: int, end: int) -> None:
        """Store random keys and values at the positions first to end - 1 of a request."""
        at = torch.arange(first, end, device=CUDA)
        pages = self.own[row]
        self.table[row, : len(pages)] = pages
        slots = pages[at // self.page_size] * self.page_size + at % self.page_size
        head_dim = self.pools[0].spec.head_dim
        k, v = torch.randn(2, end - first, KV_HEADS, head_dim, device=CUDA).bfloat16()
        store_kv(*self.pools[0].layer(self.layer), k, v, slots, self.pools[0].scales(self.layer))
        if self.pools[0].spec.fp8:
            k, v = (dequantize(*quantize(x), x.dtype) for x in (k, v))
        store_kv(*self.pools[1].layer(self.layer), k.float(), v.float(), slots)

    def drop(self, row: int, start: int) -> None:
        """Free the pages that no token from position `start` on needs. Their entries go stale."""
        first = int(first_pages(torch.tensor(start), self.rule.window, self.page_size))
        for pool in self.pools:
            self.forget(self.own[row][:first], pool)
        self.table[row, :first] = self.stale

    def step(self, num_decode: int, reqs: list[tuple[int, int]]) -> AttentionStep:
        start, lengths = np.array(reqs, dtype=np.int32).T
        rows, first, count = map(int32, (self.rows, start.tolist(), lengths.tolist()))
        return AttentionStep(num_decode, start, lengths, rows, first, count, self.table)

    def store_all(self, reqs: list[tuple[int, int]]) -> None:
        for row, (start, length) in zip(self.rows, reqs, strict=True):
            self.store(row, 0, start + length)
            self.drop(row, start)

    def backends(self, name: str) -> list[AttentionBackend]:
        """The backend called `name` and the reference, each for its own pool."""
        return [
            create_attention_backend(each, pool, self.q_heads, [self.rule])
            for each, pool in zip((name, "torch"), self.pools, strict=True)
        ]

    def check(self, attentions: Iterable[StepAttention], tokens: int) -> None:
        """Compare an attention over the first pool with one over the second."""
        dim = self.pools[0].spec.head_dim
        q = torch.randn(tokens, self.q_heads, dim, device=CUDA).bfloat16()
        outputs = []
        for attention, dtype in zip(attentions, (torch.bfloat16, torch.float32), strict=True):
            queries = q.to(dtype)
            out = torch.full_like(queries, torch.nan)
            sinks = None if self.sinks is None else self.sinks.to(dtype)
            attention.forward(self.layer, queries, out, sinks)
            outputs.append(out.float())
        close(*outputs)


def close(found: Tensor, expected: Tensor) -> None:
    """The whole output is close, and so is the output of each token."""
    assert (found - expected).norm() < 6e-3 * expected.norm()
    worst = (found - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert worst.max() < 3e-2


@pytest.fixture(scope="module", autouse=True)
def modules(request: pytest.FixtureRequest) -> None:
    """Compile the modules of the selected cases, all at the same time."""
    capability = torch.cuda.get_device_capability()
    cases = (getattr(item, "callspec", None) for item in request.session.items)
    chosen = {
        case for each in cases if each is not None for case in each.params.values() if case in NAMES
    }
    kernels = set()
    for dim, _, rule in (CASES[case] for case in chosen):
        needs = AttentionNeeds(CUDA, torch.bfloat16, dim, frozenset({rule}))
        kernels |= set(
            attention_kernels("flashinfer", [needs], [10 * capability[0] + capability[1]])
        )
    compile_missing(sorted(kernels, key=str))()


SHAPES = {
    "few": [(0, 40), (700, 1), (1031, 1), (15, 60), (2900, 16)],
    "many": [(0, 200), (33, 1), (300, 130), (1300, 700), (16, 1)],
    "whole": [(0, 5200), (0, 129)],
    "prefixes": [(1500, 4000), (3000, 1), (5000, 2500)],
    "long": [(12_000, 300), (9000, 8000)],
}


@CASE
@FP8
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill(case: str, fp8: bool, page_size: int, shape: str) -> None:
    """On Hopper, the first step copies its contexts if a copy may pay and fits."""
    reqs = SHAPES[shape]
    scene = Scene(case, page_size, reqs, fp8)
    scene.store_all(reqs)
    ours, reference = scene.backends("flashinfer,torch")
    step, tokens = scene.step(0, reqs), sum(length for _, length in reqs)
    first = ours.prepare(step)
    assert isinstance(first, InTurn) == fp8
    window, group = scene.rule.window, scene.q_heads // KV_HEADS
    if not fp8 and shape != "long":
        pays = window is None or window * group >= 1700
        copied = torch.cuda.get_device_capability()[0] == 9 and pays
        assert isinstance(first, ContiguousAttention) == copied
    scene.check((first, reference.prepare(step)), tokens)
    for _ in range(2):
        scene.check((ours.prepare(step), reference.prepare(step)), tokens)


@CASE
@FP8
@pytest.mark.parametrize("page_size", [1, 16])
def test_chunks_of_one_prompt(case: str, fp8: bool, page_size: int) -> None:
    """Before each chunk, the pages behind its window are freed."""
    chunks = [512, 3, 64, 1, 129, 2048, 700, 128, 5]
    scene = Scene(case, page_size, [(0, sum(chunks))], fp8)
    backends, done = scene.backends("flashinfer,torch"), 0
    for chunk in chunks:
        scene.store(scene.rows[0], done, done + chunk)
        scene.drop(scene.rows[0], done)
        step = scene.step(0, [(done, chunk)])
        scene.check([backend.prepare(step) for backend in backends], chunk)
        done += chunk


@CASE
@FP8
@DECODE
def test_mixed_steps(case: str, fp8: bool, name: str) -> None:
    reqs = [(0, 1), (700, 1), (4500, 1), (0, 300), (2000, 70), (17, 1)]
    scene = Scene(case, 16, reqs, fp8)
    scene.store_all(reqs)
    backends, step = scene.backends(name), scene.step(3, reqs)
    for _ in range(2):
        scene.check([backend.prepare(step) for backend in backends], 374)


@FP8
@DECODE
@pytest.mark.parametrize(
    ("case", "full"), [("d64-window-sinks", "d64-sinks"), ("d256-window-cap", "d256-cap")]
)
def test_layers_of_two_kinds(case: str, full: str, fp8: bool, name: str) -> None:
    """Window layers have a pool and a page table of their own, as in a model."""
    reqs = [(300, 1), (0, 400), (1500, 700)]
    wide, narrow = Scene(full, 16, reqs, fp8), Scene(case, 16, reqs, fp8, layer=1)
    assert wide.rows == narrow.rows
    for scene in (wide, narrow):
        scene.store_all(reqs)
    step = wide.step(1, reqs)._replace(window_table=narrow.table)
    attentions = [
        create_attention_backend(
            each, pool, wide.q_heads, [wide.rule, narrow.rule], windows=windows
        ).prepare(step)
        for each, pool, windows in zip((name, "torch"), wide.pools, narrow.pools, strict=True)
    ]
    for scene in (narrow, wide, narrow):
        scene.check(attentions, 1101)
