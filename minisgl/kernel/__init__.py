"""Kernels, each beside a plain torch reference with the same signature.

The exported functions run the reference on CPU tensors and a Triton kernel on all others
(dispatch.py). A few, such as shift_hidden, have no Triton kernel: the reference runs on all
devices. The references are in decode.py, delta.py, drafts.py, elementwise.py, fp8.py,
fp8_weights.py, gather.py, hidden.py, logits.py, mxfp4_weights.py, packed_weights.py, random.py,
rotary.py, sampling.py, ssd.py, states.py and step.py; the Triton kernels are in the package triton.
"""

from minisgl.kernel.contexts import ContextCopy
from minisgl.kernel.decode import DecodeScratch, decode_scratch
from minisgl.kernel.dispatch import (
    accept_drafts,
    add_linear,
    add_rms_norm,
    add_sinks,
    apply_norm,
    apply_token_mask,
    balanced_decode,
    begin_states,
    best_candidate,
    context_slots,
    copy_states,
    copy_words,
    count_blocks,
    find_drafts,
    gated_delta,
    gated_group_norm,
    gated_linear,
    gather_embedding,
    gather_kv,
    kv_metadata,
    linear,
    local_candidate,
    multiply_sigmoid,
    normed_linear,
    put_tokens,
    qk_norm_rope_store,
    rms_norm,
    sample,
    selective_scan,
    silu_and_mul,
    stage_tokens,
)
from minisgl.kernel.drafts import Accepted
from minisgl.kernel.elementwise import PendingNorm, rope
from minisgl.kernel.fp8 import read_kv, store_kv
from minisgl.kernel.fp8_products import fp8_add_linear, fp8_gated_linear, fp8_linear
from minisgl.kernel.gather import first_pages
from minisgl.kernel.hidden import shift_hidden
from minisgl.kernel.logits import PenaltyTensors, add_bias, apply_penalties, top_logprobs
from minisgl.kernel.random import gumbel_noise, philox4x32
from minisgl.kernel.sampling import SampledTokens, SamplingTensors
from minisgl.kernel.step import StepLayout, StepViews

__all__ = [
    "Accepted",
    "ContextCopy",
    "DecodeScratch",
    "PenaltyTensors",
    "PendingNorm",
    "SampledTokens",
    "SamplingTensors",
    "StepLayout",
    "StepViews",
    "accept_drafts",
    "add_bias",
    "add_linear",
    "add_rms_norm",
    "add_sinks",
    "apply_norm",
    "apply_penalties",
    "apply_token_mask",
    "balanced_decode",
    "begin_states",
    "best_candidate",
    "context_slots",
    "copy_states",
    "copy_words",
    "count_blocks",
    "decode_scratch",
    "find_drafts",
    "first_pages",
    "fp8_add_linear",
    "fp8_gated_linear",
    "fp8_linear",
    "gated_delta",
    "gated_group_norm",
    "gated_linear",
    "gather_embedding",
    "gather_kv",
    "gumbel_noise",
    "kv_metadata",
    "linear",
    "local_candidate",
    "multiply_sigmoid",
    "normed_linear",
    "philox4x32",
    "put_tokens",
    "qk_norm_rope_store",
    "read_kv",
    "rms_norm",
    "rope",
    "sample",
    "selective_scan",
    "shift_hidden",
    "silu_and_mul",
    "stage_tokens",
    "store_kv",
    "top_logprobs",
]
