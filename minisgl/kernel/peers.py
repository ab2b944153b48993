"""Sum over tensor-parallel ranks and RMSNorm over memory that all ranks of a host reach.

Its reference is the sum of all ranks' parts, followed by minisgl.kernel.elementwise.add_rms_norm.
"""

from typing import NamedTuple

from torch import Tensor

BLOCKS = 128  # of one call at most; all fit on an H200 at once


class PeerLayout(NamedTuple):
    """Where things lie in each rank's memory, in bytes and in this order.

    Slots [2, R, N, H], of which a call uses one half of slot_bytes; the normed rows [T, H] of a
    second shot, row_bytes; flags, int32 [2, BLOCKS, N].
    """

    slot_bytes: int
    row_bytes: int

    @property
    def flags_offset(self) -> int:
        return 2 * self.slot_bytes + self.row_bytes

    def size(self, ranks: int) -> int:
        return self.flags_offset + 2 * BLOCKS * ranks * 4


def reduce_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    peers: Tensor,
    epochs: Tensor,
    rank: int,
    layout: PeerLayout,
    rows: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of (sum over ranks of x, plus residual): returns (normed, sum). A collective.

    x, residual: contiguous [T, H] of one float dtype, with the same H and dtype in all calls that
    may be in flight; both are given up, and a new residual is made where there is none.
    weight: [H]. peers: int64 [N], the addresses of all ranks' memory as this rank sees them, N a
    power of two; epochs: int32 [BLOCKS], and all flags, are zeros before the first call. rows: this
    rank's rows of the second shot, T H elements of x.dtype or more, which asks for two shots; None
    for one. slot_bytes hold ceil(T / N) N H elements with two shots, and T N H with one.

    normed is x after one shot, else in `rows`: it is good until the next call. After two shots only
    rows rank, rank + N, ... of the sum are written. Parts are added in rank order in float32, so
    every rank returns the same bits. CUDA only. No host sync; graph-capturable; a rank that never
    comes hangs the others.
    """
    from minisgl.kernel.triton import reduce

    return reduce.reduce_norm(
        x,
        residual,
        weight,
        eps,
        peers=peers,
        epochs=epochs,
        rank=rank,
        layout=layout,
        rows=rows,
    )
