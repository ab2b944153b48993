"""Cases of `python -m bench kernels`: decode attention, and the copy of contexts for prefill.

Each case runs one layer over a bf16 or an FP8 pool with scattered pages of 16 tokens and 8 KV heads
of 128 elements. A KV head has 2 query heads (Qwen3-0.6B), 4 (Qwen3-8B) or 5 (Qwen3-14B). The cases
of gpt-oss-20b and Gemma 3 12B have the sizes of these models, one with a window and one without.

The cases with several new tokens of a request read the same keys and values as those with one. Up
to 16 / group tokens, the kernel runs as many instructions of the matrix unit as for one token, so
the expected time is the same. A whole step of Qwen3-8B takes 4.32 ms with one token and 4.69 ms
with eight.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bench.noise import fill_noise
from minisgl.attention.base import PLAIN, AttentionRule
from minisgl.kernel import dispatch
from minisgl.kernel.decode import decode_scratch
from minisgl.kvcache.pool import KVPool, KVSpec

_KV_HEADS, _DIM, _PAGE = 8, 128, 16
# Query heads of a KV head, elements of a head, and the rules of the layers. Both have 8 KV heads.
_WINDOW_MODELS = {
    "gpt-oss-20b": (8, 64, (AttentionRule(128, sinks=True), AttentionRule(sinks=True))),
    "Gemma 3 12B": (2, 256, (AttentionRule(1024), PLAIN)),
}

Make = Callable[[], Callable[[], object]]


def attention_cases() -> Iterator[tuple[str, int, Make]]:
    """Yield the fields of a kernels.Case. bytes_moved: keys, values and scales, and their copy."""
    for fp8 in (False, True):
        spec = KVSpec(_KV_HEADS, _DIM, torch.bfloat16, fp8)
        kind = "fp8" if fp8 else "bf16"
        for reqs, context in ((1, 1024), (8, 1024), (64, 1024), (256, 1024), (64, 8192)):
            for group in (2, 4, 5):
                name = f"decode attention {kind} {reqs} x {context}, group {group}"
                moved = reqs * context * spec.token_bytes
                yield name, moved, _decode(spec, reqs, context, group)
        for reqs, context in ((1, 1024), (1, 32768), (16, 1024), (64, 1024)):
            for width in (2, 4, 8):
                name = f"decode attention {kind} {reqs} x {context}, group 4, {width} tokens"
                moved = reqs * context * spec.token_bytes
                yield name, moved, _decode(spec, reqs, context, 4, width=width)
        yield from _window_cases(spec, kind)
        copied = 8192 * (spec.token_bytes + spec._replace(fp8=False).token_bytes)
        yield f"context copy {kind} 8192", copied, _copy(spec, 8192)


def _window_cases(spec: KVSpec, kind: str) -> Iterator[tuple[str, int, Make]]:
    for model, (group, dim, rules) in _WINDOW_MODELS.items():
        wide = spec._replace(head_dim=dim)
        for rule in rules:
            read = "full" if rule.window is None else f"window {rule.window}"
            for reqs, context in ((1, 1024), (1, 8192), (16, 8192), (64, 8192)):
                name = f"{model} decode attention {kind} {reqs} x {context}, {read}"
                moved = reqs * min(context, rule.window or context) * wide.token_bytes
                yield name, moved, _decode(wide, reqs, context, group, rule)


def _pool(spec: KVSpec, tokens: int) -> KVPool:
    pages, device = tokens // _PAGE, torch.device("cuda")
    pool = KVPool(spec, layers=(0,), num_pages=pages, page_size=_PAGE, device=device)
    fill_noise(pool, pages)
    return pool


def _int32(values: Tensor) -> Tensor:
    return values.to("cuda", torch.int32)


def _decode(
    spec: KVSpec, reqs: int, context: int, group: int, rule: AttentionRule = PLAIN, width: int = 1
) -> Make:
    def make() -> Callable[[], object]:
        from minisgl.kernel.triton.decode_blocks import count_blocks  # needs Triton

        kv_heads, dim = spec.kv_heads, spec.head_dim
        pool, q_heads = _pool(spec, reqs * context), kv_heads * group
        pages = torch.randperm(pool.num_pages).view(reqs, -1)
        table = _int32(torch.cat((pages, torch.full_like(pages[:1], pool.dummy_page))))
        rows, start = _int32(torch.arange(reqs)), _int32(torch.full((reqs,), context - width))
        where, lengths = (table, rows, start), torch.full_like(start, width)
        scratch = decode_scratch(256, q_heads, kv_heads, dim, pool.device, width)
        step = (rows, start, lengths, reqs)
        count_blocks(*step, scratch, spec.fp8, width, rule.window)
        tokens, columns = reqs * width, (q_heads + 2 * kv_heads) * dim
        qkv = torch.randn(tokens, columns, device="cuda", dtype=spec.dtype)
        # gpt-oss, the model with sinks, does not norm its heads.
        weight = None if rule.sinks else torch.randn(dim, device="cuda", dtype=spec.dtype)
        norms = weight, weight, 1e-6, torch.randn(context, dim, device="cuda")
        out = torch.empty(tokens, q_heads, dim, device="cuda", dtype=spec.dtype)
        sinks = torch.randn(q_heads, device="cuda", dtype=spec.dtype) if rule.sinks else None
        keys_values, scales = pool.layer(0), pool.scales(0)

        def call() -> None:
            inputs = (qkv, *norms, *keys_values, out, *where, lengths, scratch, scales, width)
            dispatch.balanced_decode(*inputs, sinks, rule.window, rule.soft_cap)

        return call

    return make


def _copy(spec: KVSpec, tokens: int) -> Make:
    def make() -> Callable[[], object]:
        pool = _pool(spec, tokens)
        pages = torch.randperm(pool.num_pages)[:, None]
        slots = _int32((pages * _PAGE + torch.arange(_PAGE)).flatten())
        shape = (2, tokens, _KV_HEADS, _DIM)
        keys, values = torch.empty(shape, device="cuda", dtype=spec.dtype)
        return lambda: dispatch.gather_kv(*pool.layer(0), slots, keys, values, pool.scales(0))

    return make
