"""Block tables: the pages of each context as rows of one tensor.

FlashInfer's TensorRT-LLM kernels and flash-attn-4 take this layout. Torch computes it on the
device, without a host sync, so a CUDA graph can capture the computation.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minisgl.attention.base import AttentionStep
from minisgl.kernel.gather import first_pages
from minisgl.kvcache.pool import KVPool


class BlockTables:
    """The block tables of the n requests of a step, in memory of fixed addresses.

    With a window, a context begins with the first page that the window of the request's first new
    token touches. The pages behind it may belong to other requests, so no table holds them. The
    kernels count positions from the end of a context, so the pages that are left out change no
    result.

    tables    int32 [n, P]: the pages of each context. The entries after the last page are
              undefined.
    contexts  int32 [n]: the tokens in these pages.
    longest   the largest number of tokens of a context for which the tables have room: P pages.
              Always whole pages: XQA derives the row stride of the table from it.
    """

    def __init__(
        self, pool: KVPool, step: AttentionStep, window: int | None, *, captured: bool = False
    ) -> None:
        """captured: for a CUDA graph, whose later steps may have contexts of any length."""
        self._size, self._step, self._window = pool.page_size, step, window
        columns = step.page_table.shape[1]
        if not captured:
            columns = -(-int((step.start + step.lengths).max()) // self._size)
        if window is not None:
            # A window and the new tokens after its first one begin at any place in a page.
            tokens = window + int(step.lengths.max()) - 1
            columns = min(columns, (tokens + self._size - 2) // self._size + 1)
        self.longest = columns * self._size
        shape, device = (len(step.device_rows), columns), pool.device
        self.tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self.contexts = torch.ones(shape[0], dtype=torch.int32, device=device)

    def compute(self) -> None:
        """Fill both tensors from the page table, the starts and the lengths of the step."""
        step, columns = self._step, self.tables.shape[1]
        torch.add(step.device_start, step.device_lengths, out=self.contexts)
        if self._window is None:
            pages = step.page_table[:, :columns]
            torch.index_select(pages, 0, step.device_rows, out=self.tables)
            return
        first = first_pages(step.device_start, self._window, self._size)
        self.contexts -= first * self._size
        places = first.unsqueeze(1) + torch.arange(columns, device=first.device)
        places = places.clamp(max=step.page_table.shape[1] - 1)
        self.tables.copy_(step.page_table[step.device_rows.unsqueeze(1), places])


def chip_obstacle(device: torch.device, majors: Sequence[int]) -> str | None:
    """Return the reason why kernels for compute capabilities `majors` cannot run on `device`.

    None: they can, or this machine has no GPU, as while kernels are compiled for another one.
    """
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    if major in majors:
        return None
    supported = ", ".join(f"{each}.x" for each in majors)
    return f"it needs a GPU of compute capability {supported}, not {major}.{minor}"


def prefix_sums(counts: Tensor) -> Tensor:
    """Return the prefix sums of int32 `counts` [n], from 0 to the total: int32 [n + 1]."""
    sums = counts.new_zeros(len(counts) + 1)
    torch.cumsum(counts, 0, dtype=torch.int32, out=sums[1:])
    return sums
