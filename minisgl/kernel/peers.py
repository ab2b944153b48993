"""The layout of the memory through which minisgl.kernel.triton.reduce sums over ranks."""

from typing import NamedTuple

BLOCKS = 128  # thread blocks of one call, at most; an H200 runs all of them at the same time


class PeerLayout(NamedTuple):
    """The parts of each rank's memory, in this order. Sizes are in bytes.

    slots        [2, R, N, H] with N ranks; a call uses one half, of slot_bytes.
    normed rows  [T, H], of row_bytes; written by the second shot.
    flags        int32 [2, BLOCKS, N].
    """

    slot_bytes: int
    row_bytes: int

    @property
    def flags_offset(self) -> int:
        """Bytes before the flags."""
        return 2 * self.slot_bytes + self.row_bytes

    def size(self, ranks: int) -> int:
        """Bytes of each rank's memory."""
        return self.flags_offset + 2 * BLOCKS * ranks * 4
