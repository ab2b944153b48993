"""The memory of a rank besides weights and KV pages, predicted from a model's config.json.

A starting engine measures the memory of steps and CUDA graphs. Here it is predicted from sizes of
tensors and from three starts on one H200.
"""

from minisgl.core import EngineConfig
from minisgl.cost.gpus import Gpu
from minisgl.engine import memory
from minisgl.engine.images import buffer_bytes
from minisgl.kernel import ContextCopy
from minisgl.kvcache.pool import KVSpec
from minisgl.layers.mlp import DenseSpec
from minisgl.models.spec import ModelSpec

_MIB = 2**20
# The remainder of Qwen3-0.6B, 8B and 14B on one H200 (bench/notebook/2026-11-26-starts.md),
# without the tensors that remainder_bytes computes, is _FIXED_BYTES + _ACTIVATION_SHARE * the
# largest activations of a step. The three starts deviate by at most 24 MiB.
_FIXED_BYTES = 1192 * _MIB
_FIXED_GRAPHS = 19  # further graphs of each of the three starts
_ACTIVATION_SHARE = 1.663
_WORKSPACE_BYTES = 128 * _MIB  # FlashInfer's float workspace for the layers of one rule
_PEER_BYTES = 240 * _MIB  # buffers that tensor-parallel ranks share
# The memory of one further graph (memory.further_graphs): one block of the driver, and the block
# that the engine adds as a margin. This is an estimate, and no start has measured it.
_GRAPH_BYTES = 4 * _MIB


def remainder_bytes(
    config: EngineConfig,
    model: ModelSpec,
    gpu: Gpu,
    context: int,
    spec: KVSpec,
    max_chunk_tokens: int,
) -> int:
    """Predict the bytes of a rank besides weights and KV pages.

    context: the longest request in tokens. max_chunk_tokens: the largest number of prompt tokens in
    one step, the same as for Engine.
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
    graphs = _GRAPH_BYTES * (max(memory.further_graphs(shapes, sizes)) - _FIXED_GRAPHS)
    graph_tokens = max((reqs * width for reqs, width in shapes), default=0)
    logits = graph_tokens * (model.vocab_size // tp) * item
    # Layers of one rule share a copy of a context (kernel/contexts.py). Attention of prompts reads
    # an FP8 pool by copies only.
    copied = 0
    for rule, kv in {mixer.rule: mixer.kv for mixer in model.kv_layers}.items():
        if spec.fp8 or (
            gpu.copies and ContextCopy.may_pay(rule.window, model.q_heads // kv.kv_heads)
        ):
            keys = context if rule.window is None else min(context, max_chunk_tokens + rule.window)
            copied += 2 * keys * max(kv.kv_heads // tp, 1) * kv.head_dim * item
    shared = _PEER_BYTES if tp > 1 else 0
    activations = int(_ACTIVATION_SHARE * max_chunk_tokens * _widest(model, tp) * item)
    workspaces = len(set(model.rules)) * _WORKSPACE_BYTES
    beside = copied + shared + buffer_bytes(config, model, spec.dtype)
    return _FIXED_BYTES + workspaces + tables + graphs + logits + beside + activations


def _widest(model: ModelSpec, tp: int) -> int:
    """Return how many numbers the widest MLP of a rank holds for one token.

    These are gate and up, their product, and the residual stream before and after the MLP.
    """
    size = model.hidden_size
    mlps = [mlp for layer in model.layers for mlp in layer.mlps]
    dense = [mlp.inner for mlp in mlps if isinstance(mlp, DenseSpec)]
    computed = [
        (experts.top_k + experts.shared) * (experts.inner // tp + size) for experts in model.experts
    ]
    return max([*(3 * inner // tp for inner in dense), *computed]) + 2 * size
