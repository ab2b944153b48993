"""The seam between a model and how attention over the paged KV pool is computed."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from minisgl.core import Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class AttentionStep:
    """What a backend may use to plan one step: B reqs, the first num_decode of them decode reqs.

    start, lengths   int32 [B] on the host, as in core.Batch; contexts are start + lengths.
    device_rows, device_start, device_lengths
                     int32 [B] on the device: the req's line in the page table, and the same two.
    page_table       int32 [rows, max_pages] on the device, this step's updates applied; entries
                     past a req's last page mean nothing.
    """

    num_decode: int
    start: Int32Array
    lengths: Int32Array
    device_rows: Tensor
    device_start: Tensor
    device_lengths: Tensor
    page_table: Tensor

    def part(self, first: int, end: int) -> "AttentionStep":
        """The step of reqs first..end alone."""
        return AttentionStep(
            num_decode=min(self.num_decode, end) - min(self.num_decode, first),
            start=self.start[first:end],
            lengths=self.lengths[first:end],
            device_rows=self.device_rows[first:end],
            device_start=self.device_start[first:end],
            device_lengths=self.device_lengths[first:end],
            page_table=self.page_table,
        )


class StepAttention(Protocol):
    """Attention of one prepared step: its metadata, ready on the device, and the way to use it."""

    def forward(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Attend causally over each req's whole context; this step's KV is in the pool already.

        q: [T, Hq, D] of the pool's dtype. out: [T, Hq, D], overwritten. No host sync.
        """


class DecodeGraphAttention(StepAttention, Protocol):
    """Attention of a decode step of fixed size over fixed tensors, to be captured in a graph."""

    def describe(self) -> None:
        """Compute the metadata on the device; the first operation of the captured part."""


@runtime_checkable
class FusedAttention(Protocol):
    """Attention that can take what the qkv projection gives."""

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        cos_sin: Tensor,
        out: Tensor,
    ) -> None:
        """Norm and rotate heads, store keys and values, and attend: see kernel.decode.decode."""


class AttentionBackend(Protocol):
    """One way to compute attention over the KV pool it was made for."""

    def prepare(self, step: AttentionStep) -> StepAttention:
        """Plan a step, once for all layers. The result refers to the device until it is done."""

    def decode_graph(self, size: int, step: AttentionStep) -> DecodeGraphAttention | None:
        """Attention for decode steps of `size` reqs over the tensors of `step`, which stay.

        None where this backend cannot run inside a CUDA graph.
        """
