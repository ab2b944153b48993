"""The layout of the memory through which minisgl.kernel.triton.reduce sums over ranks."""

from typing import NamedTuple

BLOCKS = 128  # thread blocks of one call, at most; an H200 runs all of them at the same time


class PeerLayout(NamedTuple):
    """The parts of each rank's memory, in this order. Sizes are in bytes.

    slots        [2, R, N, H]: the parts of N ranks for the R rows that this rank sums. A call uses
                 one half, slot_bytes long.
    normed rows  [T, H]: the normalised sum of all T rows, row_bytes long. The second shot of the
                 algorithm "two shots" (triton/reduce.py) writes these rows.
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
