"""The interface between a model and the computation of attention over the paged KV pool."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import StrEnum
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from minisgl.build.flashinfer_jit import AttentionKernel
from minisgl.core.batch import Int32Array
from minisgl.core.images import ImageSpan
from minisgl.kvcache.pool import KVPool


class AttentionFeature(StrEnum):
    """A part of some models that a backend may support. The value is its name in messages."""

    WINDOWS = "sliding_attention layers"
    SOFT_CAPS = "soft caps of attention scores"
    SINKS = "attention sinks"
    FP8_KV = "an FP8 KV cache"


class AttentionRule(NamedTuple):
    """The attention of some layers. All these layers share the plan of a step.

    window    the number of tokens to which a token attends, with itself. None: all earlier tokens.
    soft_cap  each score s becomes soft_cap * tanh(s / soft_cap). None: no cap (Gemma 2).
    sinks     whether each head has a sink: a further logit in the softmax, without a value.
    """

    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def features(self) -> set[AttentionFeature]:
        """The features that a backend needs for these layers."""
        wanted = {
            AttentionFeature.WINDOWS: self.window is not None,
            AttentionFeature.SOFT_CAPS: self.soft_cap is not None,
            AttentionFeature.SINKS: self.sinks,
        }
        return {feature for feature, is_wanted in wanted.items() if is_wanted}

    def module(self, variant: str, dtype: torch.dtype, head_dim: int) -> AttentionKernel:
        """Return the FlashInfer module that runs prefill under this rule. variant: fa2 or fa3."""
        masks = self.window is not None, bool(self.soft_cap)
        return AttentionKernel(variant, dtype, head_dim, *masks)


PLAIN = AttentionRule()


class AttentionNeeds(NamedTuple):
    """The requirements of a model.

    dtype: of queries, and of keys and values as attention reads them. page_size: tokens of a page.
    rules: those of all layers. fp8_kv: whether the pool stores keys and values as FP8 (KVSpec.fp8).
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    page_size: int
    rules: frozenset[AttentionRule] = frozenset({PLAIN})
    fp8_kv: bool = False


class Capabilities(NamedTuple):
    """The models that an attention backend supports. An empty tuple means no restriction.

    devices    torch device types.
    dtypes     of queries, keys and values.
    head_dims  sizes of a head.
    page_sizes tokens of a page.
    features   an empty set means none. With FP8_KV, the backend reads KVPool.scales.
    """

    devices: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    head_dims: tuple[int, ...] = ()
    page_sizes: tuple[int, ...] = ()
    features: frozenset[AttentionFeature] = frozenset()


class AttentionStep(NamedTuple):
    """The metadata with which a backend plans a step of B requests. Decode requests come first.

    num_decode       the number of decode requests. Each of them forwards the same number of tokens,
                     which is above 1 in a step with drafts.
    start, lengths   int32 [B] on the host: tokens in the cache, and tokens that the step forwards.
                     A context has start + lengths tokens.
    device_rows      int32 [B] on the device: each request's row in the page table.
    device_start, device_lengths
                     start and lengths on the device. In a step with drafts, the host has only an
                     upper bound of the start of a decode request.
    page_table       int32 [rows, max_pages] on the device, with this step's updates applied.
                     Entries past the last page of a request are undefined.
    window_table     the same for the pool of window layers, if they have a pool of their own.
                     Entries of pages behind the window are undefined too.
    device_deltas    int32 [B] on the device: added to the positions of a request's new tokens for
                     the rotary embedding. None: 0.
    spans            as in Batch. Backends attend causally; registry.PhasedAttention adds the rest.
    """

    num_decode: int
    start: Int32Array
    lengths: Int32Array
    device_rows: Tensor
    device_start: Tensor
    device_lengths: Tensor
    page_table: Tensor
    window_table: Tensor | None = None
    device_deltas: Tensor | None = None
    spans: tuple[ImageSpan, ...] = ()

    def part(self, first: int, end: int) -> "AttentionStep":
        """Return the step of the requests first to end - 1 alone."""
        return self._replace(
            num_decode=min(self.num_decode, end) - min(self.num_decode, first),
            start=self.start[first:end],
            lengths=self.lengths[first:end],
            device_rows=self.device_rows[first:end],
            device_start=self.device_start[first:end],
            device_lengths=self.device_lengths[first:end],
            device_deltas=None if self.device_deltas is None else self.device_deltas[first:end],
            spans=tuple(s._replace(at=s.at - first) for s in self.spans if first <= s.at < end),
        )


class StepAttention(Protocol):
    """Attention of one prepared step, with its metadata on the device."""

    def forward(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
        """Attend causally over the context of each request, by the layer's AttentionRule.

        The keys and values of this step's tokens are in the pool already. q: [T, Hq, D] of
        KVSpec.dtype; out: [T, Hq, D], overwritten; layer: AttentionSpec.kv_layer. sinks: [Hq] of
        the same dtype, the logits of the sinks; None if the layer has none. No host sync.
        """


class InTurn(NamedTuple):
    """Implements StepAttention with an attention for each part of a step. The last part runs first.

    parts: the index of the first token of each part, and its attention, in the order of the tokens.
    """

    parts: Sequence[tuple[int, StepAttention]]

    def forward(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
        end = len(q)
        for first, attention in reversed(self.parts):
            attention.forward(layer, q[first:end], out[first:end], sinks)
            end = first


class DecodeGraphAttention(StepAttention, Protocol):
    """Attention of a decode step of fixed size over fixed tensors, for capture in a CUDA graph."""

    def compute_metadata(self) -> None:
        """Compute the metadata of this step on the device, before the first layer attends.

        This is the first operation of the captured graph.
        """


class NormRope(NamedTuple):
    """The norm and the rotation of query and key heads, between the qkv projection and attention.

    q_weight, k_weight  [D], for an RMSNorm of each head with `eps`. Both None: no norm.
    cos_sin             float32 [max_seq_len, D], the rotary table.
    """

    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    cos_sin: Tensor


class FusedAttention(ABC):
    """A StepAttention that takes the output of the qkv projection directly.

    A subclass says so by its base class, because each layer of each step asks. `isinstance` of a
    Protocol would take 10 to 20 us.
    """

    @abstractmethod
    def attend(
        self,
        layer: int,
        qkv: Tensor,
        heads: NormRope,
        out: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        """Normalise and rotate the heads, store keys and values, and attend.

        For shapes and dtypes see kernel.decode.decode. layer, sinks: as StepAttention.forward.
        """


class AttentionBackend(ABC):
    """One way to compute attention over the KV pool.

    A subclass sets `name` and, unless it supports every model, `capabilities`. It implements
    `prepare`, and a constructor that takes the pool, the number of query heads of this rank and the
    rule of the layers. A model with layers of different rules gets one instance for each rule. The
    tuple registry.ATTENTION_BACKENDS lists the backends of minisgl. An entry point passes the
    backends of other packages in engine.Extensions.

    name: the name that users give to --attention-backend.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities] = Capabilities()

    @abstractmethod
    def __init__(self, pool: KVPool, q_heads: int, rule: AttentionRule = PLAIN) -> None: ...

    @classmethod
    def obstacle(cls, needs: AttentionNeeds) -> str | None:
        """The reason why the backend cannot run here; None if it can.

        It compares the capabilities. A subclass adds further requirements, such as a package.
        """
        able, device, dtype = cls.capabilities, needs.device.type, needs.dtype
        if able.devices and device not in able.devices:
            return f"it needs a {able.devices[0].upper()} device, not {device}"
        if able.dtypes and dtype not in able.dtypes:
            supported = " and ".join(map(_dtype_name, able.dtypes))
            return f"it supports {supported}, not {_dtype_name(dtype)}"
        if able.head_dims and needs.head_dim not in able.head_dims:
            return f"it supports head_dim {able.head_dims}, not {needs.head_dim}"
        if able.page_sizes and needs.page_size not in able.page_sizes:
            return f"it supports page_size {able.page_sizes}, not {needs.page_size}"
        wanted = {AttentionFeature.FP8_KV} if needs.fp8_kv else set[AttentionFeature]()
        if missing := wanted.union(*(rule.features for rule in needs.rules)) - able.features:
            return f"it does not support {min(missing)}"
        return None

    @classmethod
    def kernel_variants(cls, decode: bool, archs: Sequence[int]) -> frozenset[str]:
        """Names of the FlashInfer kernels that one phase runs on GPUs of `archs`.

        decode: True for the decode phase, False for prefill. archs: 90 for compute capability 9.0.
        """
        return frozenset()

    @abstractmethod
    def prepare(self, step: AttentionStep) -> StepAttention:
        """Plan a step once for all layers. All requests of the step are in the same phase.

        The caller keeps the result until the device has completed the step.
        """

    def decode_graph(self, size: int, step: AttentionStep) -> DecodeGraphAttention | None:
        """Return attention for decode steps of `size` requests over the fixed tensors of `step`.

        The engine asks for the largest size first, so that all sizes can share buffers. None: the
        backend cannot run inside a CUDA graph.
        """
        return None


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
