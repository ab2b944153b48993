"""Torch reference of the FP8 KV cache: float8_e4m3fn elements and one scale for each head.

A vector is a key or a value of one token and KV head. Its scale is the smallest power of two with
which all elements stay within 448, the largest value of e4m3. e4m3 is a floating-point format, so
a power of two costs no precision. It has three advantages over amax / 448. Multiplying by it is
exact, so that every kernel reads the same keys and values. A rounded vector does not change when it
is rounded again. A change of the last bit of one element rarely changes the rounding of the others.
"""

import torch
from torch import Tensor

# The smallest exponent of a scale, with the bias 127: the scale is 2**-60. Decode attention divides
# by the scale, and this must not overflow. Elements below 2**-70 become zero.
_LEAST = 67
_INFINITY_BITS = 0x7F800000
_ABOVE_448 = 0x1FFFFF  # carries into the exponent if a mantissa is above 1.75


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round vectors to e4m3. x: floats [..., D].

    Returns float8_e4m3fn [..., D] and bfloat16 scales [...]. If a vector has an infinite element or
    a NaN, all its elements become NaN.
    """
    wide = x.float()
    most = wide.abs().view(torch.int32).amax(-1)  # the bits of positive floats have their order
    exponents = (((most.clamp(max=_INFINITY_BITS) + _ABOVE_448) >> 23) - 8).clamp(min=_LEAST)
    inverse = ((254 - exponents) << 23).view(torch.float32)
    inverse = torch.where(most < _INFINITY_BITS, inverse, torch.nan)
    scales = (exponents << 23).view(torch.float32).bfloat16()
    return (wide * inverse.unsqueeze(-1)).to(torch.float8_e4m3fn), scales


def dequantize(vectors: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return vectors * scales in `dtype`. vectors: e4m3 [..., D]; scales: bfloat16 [...]."""
    return (vectors.float() * scales.float().unsqueeze(-1)).to(dtype)


def scales_at(scales: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The pages and the offsets within them of `slots`, as indices of the scales of one layer.

    scales: [P, Hkv, S, 2]; slots: integers. `scales[pages, :, offsets]` is [..., Hkv, 2].
    """
    page_size = scales.shape[2]
    return slots // page_size, slots % page_size


def store_kv(
    k_pool: Tensor,
    v_pool: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    scales: Tensor | None = None,
) -> None:
    """Write this step's keys and values into one layer's pool, in place.

    k_pool, v_pool: [P, S, Hkv, D]; k, v: [T, Hkv, D] of the pool's device, and of its dtype unless
    the pool is FP8. slots: integers [T] in [0, P * S), distinct except for padding. A slot is
    page * S + offset. scales: bfloat16 [P, Hkv, S, 2], the scales of keys and of values; None
    unless the pool is FP8.
    """
    if scales is not None:
        (k, k_scales), (v, v_scales) = quantize(k), quantize(v)
        pages, offsets = scales_at(scales, slots)
        scales[pages, :, offsets] = torch.stack((k_scales, v_scales), dim=-1)
        # As bytes, because torch does not index float8 on every device.
        k, v, k_pool, v_pool = (part.view(torch.uint8) for part in (k, v, k_pool, v_pool))
    k_pool.flatten(0, 1)[slots] = k
    v_pool.flatten(0, 1)[slots] = v


def read_kv(
    k_pool: Tensor, v_pool: Tensor, slots: Tensor, scales: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the keys and the values in `slots`, each [..., Hkv, D] in `dtype`.

    k_pool, v_pool, scales: as in store_kv. slots: integers [...].
    """
    if scales is not None:
        k_pool, v_pool = k_pool.view(torch.uint8), v_pool.view(torch.uint8)
    keys, values = (pool.flatten(0, 1)[slots] for pool in (k_pool, v_pool))
    if scales is None:
        return keys.to(dtype), values.to(dtype)
    keys, values = keys.view(torch.float8_e4m3fn), values.view(torch.float8_e4m3fn)
    pages, offsets = scales_at(scales, slots)
    k_scales, v_scales = scales[pages, :, offsets].unbind(-1)
    return dequantize(keys, k_scales, dtype), dequantize(values, v_scales, dtype)
