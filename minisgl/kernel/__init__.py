"""Kernels, each beside (for now: as) a plain torch reference with the same signature."""

from minisgl.kernel.elementwise import (
    add_rms_norm,
    gather_embedding,
    rms_norm,
    rope,
    silu_and_mul,
    store_kv,
)
from minisgl.kernel.random import gumbel_noise, philox4x32
from minisgl.kernel.sampling import SampledTokens, SamplingTensors, sample

__all__ = [
    "SampledTokens",
    "SamplingTensors",
    "add_rms_norm",
    "gather_embedding",
    "gumbel_noise",
    "philox4x32",
    "rms_norm",
    "rope",
    "sample",
    "silu_and_mul",
    "store_kv",
]
