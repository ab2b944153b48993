"""An engine that launches every kernel of a starting server and computes nothing.

All its tensors are on torch's meta device: they have shapes and dtypes and no memory. A launch with
such tensors compiles the kernel (triton_driver.py). Three parts of an engine need memory, and this
file replaces them: the weights stay unfilled, FlashInfer's kernels are not launched, and a copy to
the host gives zeros.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from minisgl.attention.base import (
    PLAIN,
    AttentionBackend,
    AttentionFeature,
    AttentionNeeds,
    AttentionRule,
    AttentionStep,
    Capabilities,
    StepAttention,
)
from minisgl.attention.decode import BalancedDecodes
from minisgl.attention.flashinfer import (
    ContiguousAttention,
    FlashInferAttention,
    PagedAttention,
    copy_for,
    pages_of,
)
from minisgl.attention.registry import resolve_phases
from minisgl.attention.torch import TorchAttention
from minisgl.attention.triton import TritonAttention
from minisgl.core import EngineConfig
from minisgl.distributed.comm import SingleCommunicator, TPInfo
from minisgl.distributed.peers import PeerMemory
from minisgl.engine import DEFAULT_EXTENSIONS, Engine, Extensions
from minisgl.engine.memory import resolve
from minisgl.kernel.contexts import ContextCopy
from minisgl.kvcache.pool import KVPool
from minisgl.models.build import build_model
from minisgl.models.config import load_model_spec

_META = torch.device("meta")


def dry_run(
    config: EngineConfig,
    tp: TPInfo,
    max_chunk_tokens: int,
    extensions: Extensions = DEFAULT_EXTENSIONS,
) -> None:
    """Launch, on meta tensors, every kernel that a rank of a server with `config` launches.

    tp: the rank. extensions: the extensions of the server; its attention backends are ignored.
    Reads the model's config and no weights. Raises ConfigError as Engine does.
    """
    attention = on_meta(config.attention_backend, attention_needs(config))
    config = msgspec.structs.replace(
        config, attention_backend=attention, num_pages=1, dummy_weight=True, kernel_cache=None
    )
    added = dataclasses.replace(extensions, attention_backends=(MetaAttention,))
    with HostCopies():
        DryRunEngine(config, MetaCommunicator(tp), max_chunk_tokens, added).warm_up()


def attention_needs(config: EngineConfig) -> tuple[AttentionNeeds, ...]:
    """The requirements of a server with `config` on a GPU, as Resolved. Raises ConfigError."""
    model = load_model_spec(config.model_path)
    resolved = resolve(config, model, TPInfo(0, 1), _META)
    cuda = torch.device("cuda")
    return tuple(needs._replace(device=cuda) for needs in resolved.attention_needs)


class HostCopies(TorchFunctionMode):
    """While active, the copy of a meta tensor to the host gives zeros instead of an error.

    The engine copies log-probabilities to the host.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.to and args[0].is_meta and args[1:2] == ("cpu",):
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        return func(*args, **(kwargs or {}))


class MetaCommunicator(SingleCommunicator):
    """The communicator of one tensor-parallel rank without the other ranks.

    A real rank sums over peer memory or over the process group, depending on the machine. This
    communicator launches the kernels of both ways.
    """

    def __init__(self, tp: TPInfo) -> None:
        super().__init__(tp)
        power_of_two = tp.size & (tp.size - 1) == 0
        has_peers = tp.size > 1 and power_of_two  # as GroupCommunicator.share_memory
        self.peers = PeerMemory(tp.rank, tp.size, _META) if has_peers else None

    def reduce_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if self.peers is not None and self.peers.can_sum(x):
            self.peers.reduce_norm(x, residual, weight, eps)
        return super().reduce_norm(x, residual, weight, eps)

    def gather(self, x: Tensor) -> Tensor:
        return x.new_empty((self.tp.size, *x.shape))


class MetaAttention(AttentionBackend):
    """Replaces the backends of GPUs. It launches the kernels of minisgl only.

    The kernels of other packages cannot take meta tensors. `minisgl compile` builds the modules of
    FlashInferAttention by name (attention_kernels). A server compiles the kernels of trtllm and
    flash-attention itself, at their first call.

    Decode steps launch minisgl's decode kernel, which also normalises, rotates and stores the new
    tokens. Decode by trtllm or flash-attention needs another kernel for this, qk_norm_rope_store.
    Only the prefill steps of the dry run launch it. Its compiled code is the same in both phases.

    If FlashInfer does not support the head size of a pool, torch computes prompts, as in a server.
    If the decode kernel does not support it either, torch computes decode steps too.
    """

    name = "meta"
    capabilities = Capabilities(features=frozenset(AttentionFeature))

    def __init__(self, pool: KVPool, q_heads: int, rule: AttentionRule = PLAIN) -> None:
        self._pool, self._rule = pool, rule
        self._torch = TorchAttention(pool, q_heads, rule)
        self._decodes = BalancedDecodes(pool, q_heads, rule)
        self._group = q_heads // pool.spec.kv_heads

    def prepare(self, step: AttentionStep) -> StepAttention:
        """Prepare a step of one phase. PhasedAttention has split a mixed step before."""
        kind = TritonAttention if step.num_decode else FlashInferAttention
        if self._pool.spec.head_dim not in kind.capabilities.head_dims:
            return self._torch.prepare(step)
        if step.num_decode:
            return self._decodes.prepare(step)
        pages_of(self._pool, step, self._rule.window)
        if not (self._pool.spec.fp8 or ContextCopy.may_pay(self._rule.window, self._group)):
            return PagedAttention(self._pool, _run_nothing)
        copy = copy_for(self._pool, step, self._rule.window)
        return ContiguousAttention(self._pool, step, copy, _run_nothing)


def _run_nothing(q: Tensor, *keys_and_values: object, out: Tensor, return_lse: bool = False) -> Any:
    """Take the place of the method `run` of a wrapper. Launches no kernel."""
    return (out, q.new_empty(q.shape[:2], dtype=torch.float32)) if return_lse else out


def on_meta(name: str, needs: Sequence[AttentionNeeds]) -> str:
    """Return the setting for the backends of `name`, with MetaAttention in place of those of GPUs.

    needs: as Resolved.attention_needs. If one pool has a backend of GPUs, MetaAttention takes all
    pools of that phase.
    """
    names = []
    for backends in zip(*(resolve_phases(name, each) for each in needs), strict=True):
        replaced = any("cuda" in backend.capabilities.devices for backend in backends)
        names.append(MetaAttention.name if replaced else backends[0].name)
    return ",".join(names)


class DryRunEngine(Engine):
    """An Engine on the meta device."""

    _resolve_device = staticmethod(lambda config, tp: _META)
    _build_model = staticmethod(partial(build_model, fill=False))
