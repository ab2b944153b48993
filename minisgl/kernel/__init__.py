"""Kernels, each beside a plain torch reference with the same signature.

What is exported runs the reference on CPU tensors and Triton on others (dispatch.py). The
references themselves: elementwise.py, gather.py, rotary.py, sampling.py, random.py, step.py.
"""

from minisgl.kernel.cache import compiling, filling, use_kernel_cache
from minisgl.kernel.contexts import ContextCopy
from minisgl.kernel.decode import DecodeScratch, decode_scratch
from minisgl.kernel.dispatch import (
    add_linear,
    add_rms_norm,
    balanced_decode,
    best_of_part,
    best_of_parts,
    context_slots,
    count_blocks,
    gated_linear,
    gather_embedding,
    gather_kv,
    kv_metadata,
    linear,
    put_tokens,
    qk_norm_rope_store,
    rms_norm,
    sample,
    silu_and_mul,
    stage_tokens,
    update_pages,
)
from minisgl.kernel.elementwise import PendingNorm, rope, store_kv
from minisgl.kernel.flashinfer_ahead import compile_flashinfer
from minisgl.kernel.logits import PenaltyTensors, add_bias, apply_penalties, top_logprobs
from minisgl.kernel.random import gumbel_noise, philox4x32
from minisgl.kernel.sampling import SampledTokens, SamplingTensors
from minisgl.kernel.step import StepLayout, StepViews

__all__ = [
    "ContextCopy",
    "DecodeScratch",
    "PenaltyTensors",
    "PendingNorm",
    "SampledTokens",
    "SamplingTensors",
    "StepLayout",
    "StepViews",
    "add_bias",
    "add_linear",
    "add_rms_norm",
    "apply_penalties",
    "balanced_decode",
    "best_of_part",
    "best_of_parts",
    "compile_flashinfer",
    "compiling",
    "context_slots",
    "count_blocks",
    "decode_scratch",
    "filling",
    "gated_linear",
    "gather_embedding",
    "gather_kv",
    "gumbel_noise",
    "kv_metadata",
    "linear",
    "philox4x32",
    "put_tokens",
    "qk_norm_rope_store",
    "rms_norm",
    "rope",
    "sample",
    "silu_and_mul",
    "stage_tokens",
    "store_kv",
    "top_logprobs",
    "update_pages",
    "use_kernel_cache",
]
