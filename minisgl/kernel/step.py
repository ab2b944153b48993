"""Step metadata: the packed buffer that brings it to the device, and the kernels that extend it.

This file has the torch references of these kernels.

One int32 buffer goes to the device for each step: the columns of the requests, then the page
updates, then the prompt tokens. Padding needs no flags: a padding request is the dummy row with
start 0 and length 1. The kernels below compute harmless values for it, in place, over tensors of
fixed addresses.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl.core.columns import SAMPLING_COLUMNS, Column
from minisgl.kernel.gather import first_pages

_WORDS = {np.int32: 1, np.float32: 1, np.int64: 2}  # int32 elements of one value
_TORCH_DTYPES = {np.int32: torch.int32, np.float32: torch.float32, np.int64: torch.int64}


class StepViews(NamedTuple):
    """The columns of R requests: views of one packed buffer.

    rows, start, lengths  int32 [R], as in core.Batch.
    first                 int32 [R]; exclusive sum of lengths, so the index of each request's first
                          token among the T tokens.
    samples               int32 [R]; 1 where the next token is written to the token pool.
    deltas                int32 [R], as in core.images.RopePositions; zeros for a step without it.
    sampling              each sampling column, [R], by name.
    """

    rows: Tensor
    start: Tensor
    lengths: Tensor
    first: Tensor
    samples: Tensor
    deltas: Tensor
    sampling: dict[str, Tensor]


class StepLayout:
    """The places of the columns of `reqs` requests at the beginning of a packed buffer.

    words    int32 elements of the columns, an even number. The int64 columns come first, and int64
             values may follow at `words`, so all of them are aligned to 8 bytes.
    fields   where the first six columns of StepViews are, one after the other.
    columns  each sampling column, and where it is.
    """

    def __init__(self, reqs: int, columns: Sequence[Column] = SAMPLING_COLUMNS) -> None:
        wide = [column for column in columns if _WORDS[column.dtype] == 2]
        narrow = [column for column in columns if _WORDS[column.dtype] == 1]
        begin, end = 2 * reqs * len(wide), (2 * len(wide) + 6) * reqs
        self.reqs, self.fields = reqs, slice(begin, end)
        places = [slice(2 * reqs * nth, 2 * reqs * (nth + 1)) for nth in range(len(wide))]
        places += [slice(end + reqs * nth, end + reqs * (nth + 1)) for nth in range(len(narrow))]
        self.columns = list(zip((*wide, *narrow), places, strict=True))
        end += reqs * len(narrow)
        self.words = end + end % 2

    def views(self, buffer: Tensor) -> StepViews:
        """Split an int32 tensor of at least `words` elements, without a copy."""
        sampling = {c.name: buffer[at].view(_TORCH_DTYPES[c.dtype]) for c, at in self.columns}
        fields = buffer[self.fields].view(6, self.reqs)
        rows, start, lengths, first, samples, deltas = fields.unbind()
        return StepViews(rows, start, lengths, first, samples, deltas, sampling)


def stage_tokens(
    rows: Tensor,
    start: Tensor,
    first: Tensor,
    chunk_ids: Tensor,
    num_decode_tokens: int,
    page_table: Tensor,
    token_pool: Tensor,
    page_size: int,
    ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    deltas: Tensor | None = None,
    turns: Tensor | None = None,
) -> None:
    """Fill ids, positions and KV slots of the T tokens of a step.

    rows, start, first: int32 [B], as in StepViews. The ids of the first num_decode_tokens tokens
    come from token_pool, int32 [rows, max_seq_len + 1], the others from chunk_ids, int32, at least
    T - num_decode_tokens. page_table: int32 [rows, max_pages], with this step's updates. ids,
    positions, slots: int32 [T], overwritten. deltas: int32 [B]. turns: int32 [T], overwritten by
    the position of each token plus the entry of its request in deltas; None: there are neither
    turns nor deltas. No host sync; graph-capturable while num_decode_tokens and T stay the same.
    """
    tokens = torch.arange(len(ids), device=ids.device, dtype=torch.int32)
    req = torch.searchsorted(first, tokens, right=True) - 1
    row = rows[req].long()
    where = start[req] + tokens - first[req]
    positions.copy_(where)
    if deltas is not None and turns is not None:
        turns.copy_(where + deltas[req])
    pages = page_table[row, (where // page_size).long()]
    slots.copy_(pages * page_size + where % page_size)
    decode = slice(num_decode_tokens)
    ids[decode] = token_pool[row[decode], where[decode].long()]
    ids[num_decode_tokens:] = chunk_ids[: len(ids) - num_decode_tokens]


def kv_metadata(
    rows: Tensor,
    start: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    page_size: int,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    last_page_len: Tensor,
    window: int | None = None,
) -> None:
    """Fill the paged-KV description of n requests, whose contexts are start + lengths tokens.

    rows, start, lengths: int32 [n], n at most 8192. page_table: int32 [rows, max_pages].
    kv_indptr: int32 [n + 1], cumulative numbers of pages. kv_indices: int32, the pages of the
    requests, concatenated; elements after them keep their values. last_page_len: int32 [n], from
    1 to page_size. window: as in gather.first_pages; earlier pages are left out, and their entries
    in the page table are not used. No host sync on a GPU; graph-capturable.
    Source: the layout of FlashInfer's paged wrappers.
    """
    context = start + lengths
    first = first_pages(start, window, page_size)
    end = (context + page_size - 1) // page_size
    kv_indptr[0] = 0
    kv_indptr[1:] = (end - first).cumsum(0)
    last_page_len.copy_(context - (end - 1) * page_size)
    column = torch.arange(page_table.shape[1], device=rows.device)
    used = (column >= first.unsqueeze(1)) & (column < end.unsqueeze(1))
    to = (kv_indptr[:-1] - first).unsqueeze(1) + column
    kv_indices[to[used]] = page_table[rows.long()][used]


def put_tokens(
    token_pool: Tensor,
    rows: Tensor,
    start: Tensor,
    lengths: Tensor,
    samples: Tensor,
    tokens: Tensor,
) -> None:
    """Set token_pool[rows, start + lengths] = tokens where samples is not 0, in place.

    All int32; token_pool [rows, max_seq_len + 1], the others [B]. No host sync on a GPU;
    graph-capturable.
    """
    at = rows.long(), (start + lengths).long()
    token_pool[at] = torch.where(samples != 0, tokens, token_pool[at])
