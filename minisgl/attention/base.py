"""The seam between a model and how attention over the paged KV pool is computed."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from minisgl.core import Int32Array

__all__ = ["AttentionBackend", "AttentionStep", "StepAttention"]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionStep:
    """What a backend may use to plan one step: B reqs, the first num_decode of them decode reqs.

    rows, start, lengths  int32 [B] on the host, as in core.Batch.
    host_page_table       int32 [rows, max_pages] on the host, this step's updates applied.
    page_table            the same on the device; entries past a req's last page mean nothing.
    slots                 int32 [T] on the device; where each token's key and value go.
    """

    num_decode: int
    rows: Int32Array
    start: Int32Array
    lengths: Int32Array
    host_page_table: Int32Array
    page_table: Tensor
    slots: Tensor


class StepAttention(Protocol):
    """Attention of one prepared step: its metadata, ready on the device, and the way to use it."""

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store this step's k and v, then attend causally over each req's whole context.

        q: [T, Hq, D]; k, v: [T, Hkv, D] of the pool's dtype. Returns [T, Hq, D]. No host sync.
        """
        ...


class AttentionBackend(Protocol):
    """One way to compute attention over the KV pool it was made for."""

    def prepare(self, step: AttentionStep) -> StepAttention:
        """Plan a step, once for all layers. The result refers to the device until it is done."""
        ...
