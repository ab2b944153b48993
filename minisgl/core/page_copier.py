"""The interface of an engine's copies of KV pages to host memory."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class PageCopier(Protocol):
    """Copies pages of the KV pool to blocks of host memory and back, beside the steps.

    num_blocks: the number of blocks. A block holds one page.
    block_bytes: its bytes, of this rank.
    """

    num_blocks: int
    block_bytes: int

    @property
    def num_open(self) -> int:
        """The number of the first blocks that copies may use. It grows after `start_opening`."""

    def start_opening(self) -> None:
        """Begin to make the blocks usable, beside the steps. The caller calls this once."""

    @property
    def is_opening(self) -> bool:
        """Whether num_open may still grow."""

    def wait_open(self, count: int) -> None:
        """Wait until copies may use the first `count` blocks, as on rank 0."""

    def start(
        self, job: int, pages: NDArray[np.int32], blocks: NDArray[np.int32], load: bool
    ) -> None:
        """Begin to copy pages to blocks, or blocks to pages (load), and do not wait.

        pages, blocks: int32 [n]. Copies in one direction end in the order of their starts.
        """

    def done(self, wait_s: float) -> list[int]:
        """Return the jobs that have ended since the last call. Wait for one up to wait_s."""

    def finish(self, job: int) -> None:
        """Wait until a job has ended: the steps that are launched later see its pages."""
