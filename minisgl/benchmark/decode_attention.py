"""Cases of `minisgl bench kernels`: decode attention, and the copy of contexts for prefill.

Each case runs one layer over a bf16 or an FP8 pool with scattered pages of 16 tokens and 8 KV heads
of 128 elements. A KV head has 2 query heads (Qwen3-0.6B), 4 (Qwen3-8B) or 5 (Qwen3-14B).

The cases with several new tokens of a request read the same keys and values as those with one. Up
to 16 / group tokens, the kernel runs as many instructions of the matrix unit as for one token, so
the expected time is the same. A whole step of Qwen3-8B takes 4.32 ms with one token and 4.69 ms
with eight.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from minisgl import kernel
from minisgl.kvcache.pool import KVPool, KVSpec

_KV_HEADS, _DIM, _PAGE = 8, 128, 16

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
                yield name, moved, _decode(spec, reqs, context, 4, width)
        copied = 8192 * (spec.token_bytes + spec._replace(fp8=False).token_bytes)
        yield f"context copy {kind} 8192", copied, _copy(spec, 8192)


def _pool(spec: KVSpec, tokens: int) -> KVPool:
    pages, device = tokens // _PAGE, torch.device("cuda")
    pool = KVPool(spec, layers=(0,), num_pages=pages, page_size=_PAGE, device=device)
    pool.fill_noise(pages)
    return pool


def _int32(values: Tensor) -> Tensor:
    return values.to("cuda", torch.int32)


def _decode(spec: KVSpec, reqs: int, context: int, group: int, width: int = 1) -> Make:
    def make() -> Callable[[], object]:
        pool, q_heads = _pool(spec, reqs * context), _KV_HEADS * group
        pages = torch.randperm(pool.num_pages).view(reqs, -1)
        table = _int32(torch.cat((pages, torch.full_like(pages[:1], pool.dummy_page))))
        rows, start = _int32(torch.arange(reqs)), _int32(torch.full((reqs,), context - width))
        where, lengths = (table, rows, start), torch.full_like(start, width)
        scratch = kernel.decode_scratch(256, q_heads, _KV_HEADS, _DIM, pool.device, width)
        kernel.count_blocks(rows, start, lengths, reqs, scratch, spec.fp8, width)
        tokens, columns = reqs * width, (q_heads + 2 * _KV_HEADS) * _DIM
        qkv = torch.randn(tokens, columns, device="cuda", dtype=spec.dtype)
        weight = torch.randn(_DIM, device="cuda", dtype=spec.dtype)
        norms = weight, weight, 1e-6, torch.randn(context, _DIM, device="cuda")
        out = torch.empty(tokens, q_heads, _DIM, device="cuda", dtype=spec.dtype)
        keys_values, scales = pool.layer(0), pool.scales(0)

        def call() -> None:
            inputs = (qkv, *norms, *keys_values, out, *where, lengths)
            kernel.balanced_decode(*inputs, scratch, scales, width)

        return call

    return make


def _copy(spec: KVSpec, tokens: int) -> Make:
    def make() -> Callable[[], object]:
        pool = _pool(spec, tokens)
        pages = torch.randperm(pool.num_pages)[:, None]
        slots = _int32((pages * _PAGE + torch.arange(_PAGE)).flatten())
        shape = (2, tokens, _KV_HEADS, _DIM)
        keys, values = torch.empty(shape, device="cuda", dtype=spec.dtype)
        return lambda: kernel.gather_kv(*pool.layer(0), slots, keys, values, pool.scales(0))

    return make
