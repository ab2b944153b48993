"""From a Batch to device tensors: host arithmetic in numpy, then one copy."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.core import Batch, Int32Array
from minisgl.kernel import SamplingTensors

__all__ = ["StepInputs", "stage", "upload"]

_ALIGNMENT = 8  # bytes; the widest element sent is int64


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """One step's inputs on the device; N reqs sample. All integers are int32.

    page_rows, page_cols, page_ids  [U] as in Batch.
    decode_rows, decode_cols        [num_decode]; where the decode reqs' ids lie in the token pool.
    chunk_ids                       [T - num_decode].
    positions, slots                [T].
    sampled_reqs                    on the host: which of the B reqs the N are.
    last_tokens                     [N]; index among the T of each sampling req's last token.
    write_rows, write_cols          [N]; where its next token goes in the token pool.
    sampling                        None when N is 0.
    """

    page_rows: Tensor
    page_cols: Tensor
    page_ids: Tensor
    decode_rows: Tensor
    decode_cols: Tensor
    chunk_ids: Tensor
    positions: Tensor
    slots: Tensor
    sampled_reqs: NDArray[np.intp]
    last_tokens: Tensor
    write_rows: Tensor
    write_cols: Tensor
    sampling: SamplingTensors | None


def stage(
    batch: Batch, host_page_table: Int32Array, page_size: int, device: torch.device
) -> StepInputs:
    """Apply the batch's page updates to the host page table, and send what the device needs."""
    host_page_table[batch.page_rows, batch.page_cols] = batch.page_ids
    n = batch.num_decode
    ends = np.cumsum(batch.lengths, dtype=np.int32)
    req_of_token = np.repeat(np.arange(batch.num_reqs, dtype=np.int32), batch.lengths)
    tokens = np.arange(len(req_of_token), dtype=np.int32)
    positions = tokens + (batch.start - ends + batch.lengths)[req_of_token]
    pages = host_page_table[batch.rows[req_of_token], positions // page_size]
    sampled = np.flatnonzero(batch.samples)
    sent = upload(
        {
            "seed": batch.sampling.seed[sampled],
            "page_rows": batch.page_rows,
            "page_cols": batch.page_cols,
            "page_ids": batch.page_ids,
            "decode_rows": batch.rows[:n],
            "decode_cols": batch.start[:n],
            "chunk_ids": batch.chunk_ids,
            "positions": positions,
            "slots": pages * page_size + positions % page_size,
            "last_tokens": (ends - 1)[sampled],
            "write_rows": batch.rows[sampled],
            "write_cols": (batch.start + batch.lengths)[sampled],
            "temperature": batch.sampling.temperature[sampled],
            "top_k": batch.sampling.top_k[sampled],
            "top_p": batch.sampling.top_p[sampled],
            "min_p": batch.sampling.min_p[sampled],
        },
        device,
    )
    return StepInputs(
        page_rows=sent["page_rows"],
        page_cols=sent["page_cols"],
        page_ids=sent["page_ids"],
        decode_rows=sent["decode_rows"],
        decode_cols=sent["decode_cols"],
        chunk_ids=sent["chunk_ids"],
        positions=sent["positions"],
        slots=sent["slots"],
        sampled_reqs=sampled,
        last_tokens=sent["last_tokens"],
        write_rows=sent["write_rows"],
        write_cols=sent["write_cols"],
        sampling=_sampling(batch, sampled, sent) if len(sampled) else None,
    )


def _sampling(batch: Batch, sampled: NDArray[np.intp], sent: dict[str, Tensor]) -> SamplingTensors:
    asked = batch.sampling
    drawn = sampled[asked.temperature[sampled] > 0]
    filters = (asked.top_k[drawn] > 0) | (asked.top_p[drawn] < 1) | (asked.min_p[drawn] > 0)
    return SamplingTensors(
        temperature=sent["temperature"],
        top_k=sent["top_k"],
        top_p=sent["top_p"],
        min_p=sent["min_p"],
        seed=sent["seed"],
        position=sent["write_cols"],
        draws=bool(len(drawn)),
        filters=bool(filters.any()),
    )


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
