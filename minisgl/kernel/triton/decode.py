"""Launches the decode attention kernel (decode_kernel.py)."""

from torch import Tensor

from minisgl.kernel.decode import DecodeScratch, fewest_warps
from minisgl.kernel.triton.decode_blocks import LOG2E, constants, most_reqs, program_warps
from minisgl.kernel.triton.decode_blocks import count_blocks as count_blocks
from minisgl.kernel.triton.decode_kernel import decode_kernel
from minisgl.kernel.triton.launch import Launcher, fill_absent
from minisgl.kernel.triton.overlap import current_device

_launcher = Launcher(decode_kernel, current_device)


def decode(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos_sin: Tensor | None,
    k_pool: Tensor,
    v_pool: Tensor,
    out: Tensor,
    page_table: Tensor,
    rows: Tensor,
    start: Tensor,
    lengths: Tensor,
    scratch: DecodeScratch,
    scales: Tensor | None = None,
    queries: int = 1,
    sinks: Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    deltas: Tensor | None = None,
) -> None:
    """As the reference, in bfloat16 or float16; the rows of qkv may be strided.

    Three kernels run in this order: count_blocks, then a kernel without PDL, such as stage_tokens,
    then this one. PDL is programmatic dependent launch; overlap.py (I3) says why the order is
    needed. Padded requests come after all others. No host sync; graph-capturable; the same result
    in every run.
    """
    reqs, (_, q_heads, head_dim) = len(rows), out.shape
    _, page_size, kv_heads, _ = k_pool.shape
    turned, normed = cos_sin is not None, q_weight is not None and k_weight is not None
    several, fp8 = queries > 1, scales is not None
    warps = program_warps(reqs, kv_heads, q_heads // kv_heads, head_dim, turned, queries)
    tensors = (
        qkv,
        *fill_absent(qkv, q_weight, k_weight, cos_sin),
        k_pool,
        v_pool,
        scales,
        sinks,
        out,
        page_table,
        rows,
        start,
        lengths,
        *scratch[:4],
        scratch.tokens if several else None,
        deltas if turned else None,
    )
    heads = kv_heads, q_heads, queries, head_dim
    pool = page_size, k_pool.stride(1)
    variant = *heads, *pool, turned, normed, window, soft_cap, warps, fp8, most_reqs(scratch)
    _launcher(
        (len(scratch.partial_outputs) * fewest_warps(head_dim) // (2 * warps),),
        tensors,
        (qkv.stride(0), page_table.stride(0)),
        (eps, head_dim**-0.5 * LOG2E, reqs, len(out) if several else None),
        variant,
        lambda: constants(*variant),
    )
