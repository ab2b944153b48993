"""The memory of a rank besides weights and KV pages, predicted from a model's config.json.

A starting engine measures the memory of steps and CUDA graphs. Here it is predicted from sizes of
tensors and from a start on one H200.
"""

from minisgl.attention.flashinfer import workspace_bytes
from minisgl.core import EngineConfig
from minisgl.cost.gpus import Gpu
from minisgl.engine import memory
from minisgl.engine.host_copies import device_bytes
from minisgl.engine.images import buffer_bytes
from minisgl.engine.segments import BLOCK_SHARE
from minisgl.kernel.contexts import ContextCopy
from minisgl.kvcache.pool import KVSpec
from minisgl.layers.mlp import DenseSpec
from minisgl.models.spec import ModelSpec

_MIB = 2**20
# The constants are those of a start of Qwen3.6-27B in int4 on one H200
# (bench/notebook/2026-11-28-memory.md).
_CONTEXT_BYTES = 597 * _MIB  # in use when the engine starts
_FIXED_BYTES = 163 * _MIB  # kernels, the workspace of cuBLAS and small tensors
# The loader changes the order of codes of less than 8 bits. torch then keeps this share of the
# weights in gaps.
_GAP_SHARE = 0.0245
_MULTIPROCESSORS = 132  # of an H100 and an H200; the workspace of attention depends on them
_PEER_BYTES = 240 * _MIB  # buffers that tensor-parallel ranks share
# The driver's memory of the graphs of one size, for each layer with attention, which ends a
# piecewise graph. The margin of the engine is beside it.
_GRAPH_LAYER_BYTES = int(0.25 * _MIB)


def remainder_bytes(
    config: EngineConfig,
    model: ModelSpec,
    gpu: Gpu,
    context: int,
    spec: KVSpec,
    max_chunk_tokens: int,
    packed_bytes: int,
) -> int:
    """Predict the bytes of a rank besides weights and KV pages.

    context: the longest request in tokens. max_chunk_tokens: the largest number of prompt tokens in
    one step, the same as for Engine. packed_bytes: all weights if the linears or the experts have
    less than 8 bits, else 0.
    """
    tp, rows, item = config.tp_size, config.max_running_reqs + 1, spec.dtype.itemsize
    page_table = len(model.pools) * rows * -(-context // config.page_size)
    token_pool = rows * (context + 1)
    has_mixed = model.encoder is not None and model.encoder.sections is not None
    mixed = max_chunk_tokens if has_mixed else 0  # rows of image tokens
    rotary = sum(model.rope_widths.values()) * (context + mixed)
    tables = 4 * (page_table + token_pool + rotary)
    shapes, sizes = memory.graph_sizes(
        config, model, max_chunk_tokens, drafting=config.speculative is not None
    )
    count = len(shapes) + len(sizes) if shapes else 0
    each = _GRAPH_LAYER_BYTES * len(model.attention) + memory.GRAPH_MARGIN_BYTES
    graphs = count * each
    graph_tokens = max((reqs * width for reqs, width in shapes), default=0)
    logits = graph_tokens * (model.vocab_size // tp) * item
    # Layers of one rule share a copy of a context (kernel/contexts.py). Attention of prompts reads
    # an FP8 pool by copies only.
    copied = workspaces = 0
    for rule, mixer in {mixer.rule: mixer for mixer in model.kv_layers}.items():
        q_heads, kv = mixer.q_heads // tp, mixer.kv.of_rank(tp)
        workspaces += workspace_bytes(_MULTIPROCESSORS, q_heads, kv)
        if spec.fp8 or (gpu.copies and ContextCopy.may_pay(rule.window, q_heads // kv.kv_heads)):
            keys = context if rule.window is None else min(context, max_chunk_tokens + rule.window)
            copied += 2 * keys * kv.kv_heads * kv.head_dim * item
    shared = _PEER_BYTES if tp > 1 else 0
    # Eager steps and graphs have memory of their own.
    tokens = max_chunk_tokens + rows + (max(sizes, default=0) if shapes else 0)
    blocks = int(BLOCK_SHARE * (tokens * _widest(model, tp) * item + copied))
    context_bytes = int(config.memory_ratio * _CONTEXT_BYTES)
    fixed = _FIXED_BYTES + context_bytes + int(_GAP_SHARE * packed_bytes)
    beside = shared + device_bytes(config) + buffer_bytes(config, model, spec.dtype)
    return fixed + workspaces + tables + graphs + logits + beside + blocks


def _widest(model: ModelSpec, tp: int) -> int:
    """Return how many numbers the widest MLP of a rank holds for one token.

    These are gate and up, their product, the residual stream, and the outputs of two blocks that
    it does not contain yet.
    """
    size = model.hidden_size
    mlps = [mlp for layer in model.layers for mlp in layer.mlps]
    dense = [mlp.inner for mlp in mlps if isinstance(mlp, DenseSpec)]
    computed = [
        (experts.top_k + experts.shared) * (experts.inner // tp + size) for experts in model.experts
    ]
    return max([*(3 * inner // tp for inner in dense), *computed]) + 3 * size
