"""A step's metadata on the device: the packed buffer it arrives in, and what is computed from it.

One int32 buffer travels to the device for each step. Padding needs no flags: a padded req is the
dummy row with start 0 and length 1, a padded page update writes the dummy page to the dummy row,
so the kernels below compute harmless values for them, in place, over static tensors.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class StepViews(NamedTuple):
    """Views of one packed buffer; R = max_reqs, U = max_updates, C = max_chunk_tokens.

    seed int64 [R]; rows, start, lengths, first, samples, top_k int32 [R]; temperature, top_p,
    min_p float32 [R]; page_rows, page_cols, page_ids int32 [U]; chunk_ids int32 [C].
    first is the exclusive sum of lengths: where each req's tokens begin among the T.
    samples is 1 where the req's next token is to be written to the token pool.
    """

    seed: Tensor
    rows: Tensor
    start: Tensor
    lengths: Tensor
    first: Tensor
    samples: Tensor
    top_k: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    page_rows: Tensor
    page_cols: Tensor
    page_ids: Tensor
    chunk_ids: Tensor


class StepLayout(NamedTuple):
    """Capacities of a packed buffer. chunk_ids come last, so that a copy may end where they do."""

    max_reqs: int
    max_updates: int
    max_chunk_tokens: int

    @property
    def size(self) -> int:
        """int32 elements of the buffer."""
        return self.chunk_offset + self.max_chunk_tokens

    @property
    def chunk_offset(self) -> int:
        """Elements before chunk_ids: a step with n chunk tokens is its first chunk_offset + n."""
        return 11 * self.max_reqs + 3 * self.max_updates

    def views(self, buffer: Tensor) -> StepViews:
        """Split an int32 [size] tensor, on host or device, aligned to 8 bytes, without a copy."""
        reqs, updates = self.max_reqs, self.max_updates
        fields = buffer[2 * reqs : 11 * reqs].view(9, reqs)
        pages = buffer[11 * reqs : self.chunk_offset].view(3, updates)
        return StepViews(
            seed=buffer[: 2 * reqs].view(torch.int64),
            rows=fields[0],
            start=fields[1],
            lengths=fields[2],
            first=fields[3],
            samples=fields[4],
            top_k=fields[5],
            temperature=fields[6].view(torch.float32),
            top_p=fields[7].view(torch.float32),
            min_p=fields[8].view(torch.float32),
            page_rows=pages[0],
            page_cols=pages[1],
            page_ids=pages[2],
            chunk_ids=buffer[self.chunk_offset :],
        )


def update_pages(
    page_table: Tensor, page_rows: Tensor, page_cols: Tensor, page_ids: Tensor
) -> None:
    """page_table[page_rows, page_cols] = page_ids, in place; equal pairs carry equal ids.

    page_table: int32 [rows, max_pages]; the others int32 [U]. No host sync; graph-capturable.
    """
    page_table[page_rows.long(), page_cols.long()] = page_ids


def stage_tokens(
    rows: Tensor,
    start: Tensor,
    first: Tensor,
    chunk_ids: Tensor,
    num_decode: int,
    page_table: Tensor,
    token_pool: Tensor,
    page_size: int,
    ids: Tensor,
    positions: Tensor,
    slots: Tensor,
) -> None:
    """Fill ids, positions and slots of the T tokens of a step.

    rows, start, first: int32 [B], as in StepViews; the first num_decode reqs have one token each.
    chunk_ids: int32, at least T - num_decode. page_table: int32 [rows, max_pages], up to date.
    token_pool: int32 [rows, max_seq_len + 1]. ids, positions, slots: int32 [T], overwritten.
    No host sync; graph-capturable while num_decode and T stay the same.
    """
    tokens = torch.arange(len(ids), device=ids.device, dtype=torch.int32)
    req = torch.searchsorted(first, tokens, right=True) - 1
    row = rows[req].long()
    where = start[req] + tokens - first[req]
    positions.copy_(where)
    pages = page_table[row, (where // page_size).long()]
    slots.copy_(pages * page_size + where % page_size)
    ids[:num_decode] = token_pool[row[:num_decode], where[:num_decode].long()]
    ids[num_decode:] = chunk_ids[: len(ids) - num_decode]


def kv_metadata(
    rows: Tensor,
    start: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    page_size: int,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    last_page_len: Tensor,
) -> None:
    """Fill the paged-KV description of n reqs, whose contexts are start + lengths tokens.

    rows, start, lengths: int32 [n], n at most 8192. page_table: int32 [rows, max_pages].
    kv_indptr: int32 [n + 1], cumulative numbers of pages; kv_indices: int32, the reqs' pages one
    after the other, what lies behind them is left as it is; last_page_len: int32 [n], 1..page_size.
    No host sync on a GPU; graph-capturable.
    Source: the layout of FlashInfer's paged wrappers.
    """
    context = start + lengths
    pages = (context + page_size - 1) // page_size
    kv_indptr[0] = 0
    kv_indptr[1:] = pages.cumsum(0)
    last_page_len.copy_(context - (pages - 1) * page_size)
    column = torch.arange(page_table.shape[1], device=rows.device)
    used = column < pages.unsqueeze(1)
    to = kv_indptr[:-1].unsqueeze(1) + column
    kv_indices[to[used]] = page_table[rows.long()][used]


def put_tokens(
    token_pool: Tensor,
    rows: Tensor,
    start: Tensor,
    lengths: Tensor,
    samples: Tensor,
    tokens: Tensor,
) -> None:
    """token_pool[rows, start + lengths] = tokens where samples is not 0, in place.

    All int32; token_pool [rows, max_seq_len + 1], the others [B]. No host sync on a GPU;
    graph-capturable.
    """
    at = rows.long(), (start + lengths).long()
    token_pool[at] = torch.where(samples != 0, tokens, token_pool[at])
