"""The memory that all ranks of a host reach, for minisgl.kernel.triton.reduce."""

from typing import NamedTuple

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
