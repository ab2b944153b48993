"""From a Batch to device tensors: host arithmetic in numpy, then one copy."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.core import Batch, Int32Array
from minisgl.kernel import StepLayout, StepViews

_ALIGNMENT = 8  # bytes; the widest element sent is int64


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """One step on its way to the device. Its reqs stand in the order of place_reqs.

    order     intp [B] on the host; order[i] is the index in the batch of the req at place i.
    start, lengths   int32 [N] on the host, in that order; N is B plus padding.
    packed    int32 on the host, pinned for a GPU; layout says where things are in it.
    """

    order: NDArray[np.intp]
    start: Int32Array
    lengths: Int32Array
    layout: StepLayout
    packed: Tensor

    @property
    def places(self) -> NDArray[np.intp]:
        """intp [B]: the place of each req of the batch."""
        return np.argsort(self.order)


def place_reqs(batch: Batch) -> NDArray[np.intp]:
    """Decode reqs by falling context, so that the blocks of attention that start last are short
    and all multiprocessors end together; chunks as they come."""
    order = np.arange(batch.num_reqs)
    order[: batch.num_decode] = np.argsort(-batch.start[: batch.num_decode], kind="stable")
    return order


def pack(batch: Batch, size: int, dummy_row: int, pinned: bool) -> StepInputs:
    """Lay the batch out for one copy, padded to `size` reqs with the dummy row."""
    reqs, order = batch.num_reqs, place_reqs(batch)
    layout = StepLayout(size, len(batch.page_ids), len(batch.chunk_ids))
    packed = torch.empty(layout.size, dtype=torch.int32, pin_memory=pinned)
    host: Any = StepViews._make(view.numpy() for view in layout.views(packed))
    start, lengths, asked = host.start, host.lengths, batch.sampling
    host.rows[:reqs] = batch.rows[order]
    start[:reqs] = batch.start[order]
    lengths[:reqs] = batch.lengths[order]
    host.samples[:reqs] = batch.samples[order]
    host.seed[:reqs] = asked.seed[order]
    host.temperature[:reqs] = asked.temperature[order]
    host.top_k[:reqs] = asked.top_k[order]
    host.top_p[:reqs] = asked.top_p[order]
    host.min_p[:reqs] = asked.min_p[order]
    pad(host, reqs, dummy_row)
    host.page_rows[:] = batch.page_rows
    host.page_cols[:] = batch.page_cols
    host.page_ids[:] = batch.page_ids
    host.chunk_ids[:] = batch.chunk_ids
    return StepInputs(order, start, lengths, layout, packed)


def pad(host: Any, first: int, dummy_row: int) -> None:
    """Make the reqs from place `first` on harmless, and fill host.first.

    host: StepViews of numpy arrays. A padded req computes one token on the dummy page, samples
    greedily and writes nothing.
    """
    host.rows[first:] = dummy_row
    host.start[first:] = 0
    host.lengths[first:] = 1
    for field in (host.samples, host.seed, host.temperature, host.top_k, host.min_p):
        field[first:] = 0
    host.top_p[first:] = 1
    host.first[0] = 0
    np.cumsum(host.lengths[:-1], out=host.first[1:])


def upload(arrays: dict[str, NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """Copy all arrays to the device in one transfer; the tensors keep names and dtypes.

    On a GPU the copy is asynchronous from pinned memory, which torch keeps until it is done.
    """
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays.values()]
    offsets = np.cumsum([0, *sizes]).tolist()
    buffer = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    view = buffer.numpy()
    for array, offset in zip(arrays.values(), offsets, strict=False):
        view[offset : offset + array.nbytes] = np.ascontiguousarray(array).view(np.uint8)
    sent = buffer.to(device, non_blocking=True)
    return {
        name: sent[offset : offset + array.nbytes].view(torch.from_numpy(array[:0]).dtype)
        for (name, array), offset in zip(arrays.items(), offsets, strict=False)
    }
