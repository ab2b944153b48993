"""Steps of requests under the attention rules of models, and their reference in float32.

Pages behind a window hold NaN, and so does the page that their stale entries in the page table
name: another request may own such a page.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import (
    PLAIN,
    AttentionBackend,
    AttentionRule,
    AttentionStep,
    StepAttention,
)
from minisgl.attention.registry import create_attention_backend
from minisgl.kernel.fp8 import dequantize, quantize, store_kv
from minisgl.kernel.gather import first_pages
from minisgl.kvcache.pool import KVPool, KVSpec

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
# Rules without a window, a cap or sinks: Qwen3-0.6B, 8B and 14B, and heads of other sizes.
PLAIN_CASES = {
    "d128-2": (128, 2, PLAIN),
    "d128-4": (128, 4, PLAIN),
    "d128-5": (128, 5, PLAIN),
    "d64-8": (64, 8, PLAIN),
    "d256-8": (256, 8, PLAIN),
}


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
        dim, group, self.rule = (CASES | PLAIN_CASES)[case]
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
