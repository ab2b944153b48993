"""Cases of `python -m bench kernels`: attention of one layer by each backend that runs here.

The layer has the heads of Qwen3-8B in bfloat16, over scattered pages. Decode begins with the output
of the qkv projection, as in the engine: a backend whose kernel does not norm, rotate and store the
new tokens runs another kernel for this first. Prompts begin with the stored keys. The metadata of a
step, which all layers share, is not part of the time.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.noise import fill_noise
from minisgl.attention.base import (
    AttentionBackend,
    AttentionNeeds,
    AttentionStep,
    FusedAttention,
    NormRope,
)
from minisgl.attention.registry import attention_kernels, create_attention_backend, resolve_phases
from minisgl.build.flashinfer_jit import compile_modules
from minisgl.core import ConfigError
from minisgl.kernel.dispatch import qk_norm_rope_store
from minisgl.kvcache.pool import KVPool, KVSpec

_Q_HEADS, _SPEC = 32, KVSpec(8, 128, torch.bfloat16)
_BACKENDS = ("flashinfer", "trtllm", "flash-attention")
_PAGES = (16, 32, 64)
_DECODE = ((1, 1024), (1, 8192), (64, 1024), (64, 8192), (256, 1024))  # rows and context of each
_PROMPTS = (2048, 8192)

Make = Callable[[], Callable[[], object]]


def paged_cases() -> Iterator[tuple[str, int, Make]]:
    """Yield the fields of a kernels.Case. bytes_moved: keys and values, queries and outputs."""
    of_token = 2 * _Q_HEADS * _SPEC.head_dim * _SPEC.dtype.itemsize
    for page in _PAGES:
        for name in _BACKENDS:
            reason = _obstacle(name, page)
            if reason is not None:
                print(f"left out: pages of {page}, {reason}", file=sys.stderr)
                continue
            for reqs, context in _DECODE:
                moved = reqs * (context * _SPEC.token_bytes + of_token)
                case = f"paged decode {name} {reqs} x {context}, pages of {page}"
                yield case, moved, partial(_decode, name, page, reqs, context)
            for tokens in _PROMPTS:
                moved = tokens * (_SPEC.token_bytes + of_token)
                case = f"paged prompt {name} {tokens}, pages of {page}"
                yield case, moved, partial(_prompt, name, page, tokens)


def _needs(page: int) -> AttentionNeeds:
    return AttentionNeeds(torch.device("cuda"), _SPEC.dtype, _SPEC.head_dim, page_size=page)


def _obstacle(name: str, page: int) -> str | None:
    try:
        resolve_phases(name, _needs(page))
    except ConfigError as error:
        return str(error)
    return None


def _scene(
    name: str, page: int, reqs: int, start: int, length: int
) -> tuple[KVPool, AttentionBackend, AttentionStep]:
    """A pool, a backend over it, and a step of `reqs` requests with `start` cached tokens."""
    of_req = -(-(start + length) // page)
    device = torch.device("cuda")
    pool = KVPool(_SPEC, layers=(0,), num_pages=reqs * of_req, page_size=page, device=device)
    fill_noise(pool, pool.num_pages)
    order = torch.randperm(pool.num_pages).view(reqs, of_req)
    table = torch.cat((order, torch.full_like(order[:1], pool.dummy_page)))
    firsts, counts = (np.full(reqs, each, dtype=np.int32) for each in (start, length))
    rows = torch.arange(reqs, dtype=torch.int32, device=device)
    first, count = (torch.from_numpy(each).to(device) for each in (firsts, counts))
    table = table.to(device, torch.int32)
    step = AttentionStep(0, firsts, counts, rows, first, count, table)
    return pool, create_attention_backend(name, pool, _Q_HEADS), step


def _decode(name: str, page: int, reqs: int, context: int) -> Callable[[], object]:
    pool, backend, step = _scene(name, page, reqs, context - 1, 1)
    attention = backend.decode_graph(reqs, step._replace(num_decode=reqs))
    assert attention is not None, name
    attention.compute_metadata()
    heads, dim = (_Q_HEADS, _SPEC.kv_heads), _SPEC.head_dim
    qkv, weights = _normal(reqs, (heads[0] + 2 * heads[1]) * dim), _normal(2, dim)
    norms = NormRope(weights[0], weights[1], 1e-6, torch.randn(context, dim, device="cuda"))
    out = _normal(reqs, heads[0], dim)
    if isinstance(attention, FusedAttention):
        return partial(attention.attend, 0, qkv, norms, out)
    pages = step.page_table[:reqs, (context - 1) // page]
    slots, keys_values = pages * page + (context - 1) % page, pool.layer(0)

    def call() -> None:
        where = (step.device_start, slots, *keys_values)
        q = qk_norm_rope_store(qkv, *norms, *where, *heads, dim)
        attention.forward(0, q, out)

    return call


def _prompt(name: str, page: int, tokens: int) -> Callable[[], object]:
    major, minor = torch.cuda.get_device_capability()
    compile_modules(attention_kernels(name, [_needs(page)], [10 * major + minor]))
    _, backend, step = _scene(name, page, 1, 0, tokens)
    backend.prepare(step)  # the first step of a backend may choose other kernels
    attention: Any = backend.prepare(step)
    q, out = (_normal(tokens, _Q_HEADS, _SPEC.head_dim) for _ in range(2))
    return partial(attention.forward, 0, q, out)


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=_SPEC.dtype)
