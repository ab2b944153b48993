"""Decode attention by our own kernel: nothing is planned on the host, so graphs can hold it."""

from torch import Tensor

from minisgl.attention.base import AttentionStep
from minisgl.kernel import DecodeScratch, balanced_decode, count_blocks
from minisgl.kvcache.pool import KVPool


class BalancedDecode:
    """Implements DecodeGraphAttention, and StepAttention for steps with prompt tokens as well.

    All may share a scratch that is large enough: steps run one after the other.
    """

    def __init__(self, pool: KVPool, step: AttentionStep, scratch: DecodeScratch) -> None:
        self._pool = pool
        self._table = step.page_table
        self._reqs = (step.device_rows, step.device_start, step.device_lengths)
        self._scratch = scratch

    def describe(self) -> None:
        count_blocks(*self._reqs, len(self._table) - 1, self._scratch)

    def forward(self, layer: int, q: Tensor, out: Tensor) -> None:
        self._run(layer, q.flatten(1), None, None, 0.0, None, out)

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
        self._run(layer, qkv, q_weight, k_weight, eps, cos_sin, out)

    def _run(
        self,
        layer: int,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        cos_sin: Tensor | None,
        out: Tensor,
    ) -> None:
        norms, pools = (q_weight, k_weight, eps, cos_sin), self._pool.layer(layer)
        balanced_decode(qkv, *norms, *pools, out, self._table, *self._reqs, self._scratch)
