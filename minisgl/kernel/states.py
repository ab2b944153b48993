"""Layers with recurrent states: their requests in a step, and copies of states. Torch references.

The state of a row stands at a boundary: it is that of the tokens before the end of a page. A short
history of the tokens after the boundary follows it. A step moves the state to a later boundary when
the row has entered a new page, so a copy of the state is valid at the end of a page at any time,
and a rejected draft needs no rollback (docs/decisions/34-state-rule.md).
"""

from typing import NamedTuple

import torch
from torch import Tensor

LOADED = 2**30  # the boundary of a row whose state was loaded: the start of its next step


class StateStep(NamedTuple):
    """The requests of a step as all layers with states need them, int32 on the device.

    rows, start, first
              [N] as in StepViews.
    lengths   [N], the tokens that the step forwards; 0 for padding.
    base      [N]: the boundary at which the state of the row stands before the step.
    target    [N]: the boundary at which it stands after the step.
    chunks    0 if all requests decode. Otherwise the expected number of chunks, by which kernels
              choose their sizes.
    padded    some requests may be padding. Otherwise the last `chunks` requests are the chunks.
    """

    rows: Tensor
    start: Tensor
    lengths: Tensor
    first: Tensor
    base: Tensor
    target: Tensor
    chunks: int
    padded: bool

    @classmethod
    def of(cls, columns: Tensor, chunks: int, padded: bool = True) -> "StateStep":
        """Return the step with these columns, int32 [6, N]."""
        rows, start, lengths, first, base, target = columns.unbind(0)
        return cls(rows, start, lengths, first, base, target, chunks, padded)


def begin_states(
    boundaries: Tensor,
    rows: Tensor,
    start: Tensor,
    lengths: Tensor,
    first: Tensor,
    num_decode: int,
    page_size: int,
    count: int,
    size: int,
    out: Tensor,
) -> None:
    """Fill the columns of a StateStep, and move the boundaries of the rows to their targets.

    boundaries: int32 [R], the boundary of each row's state; the last row is for padding. rows,
    start, lengths, first: int32 [B]. out: int32 [6, N], overwritten with the columns of a StateStep
    in its order. If N > B, the first padding request has the tokens from `count`, the number of
    tokens of the requests, up to `size`, and all others have none.

    A decode request moves to the page of its first token: its last tokens may be drafts, which can
    be rejected. A chunk moves to the page of its last token. A row that starts at token 0 has no
    state yet, so its base is 0. No host sync; graph-capturable.
    """
    reqs = len(rows)
    out[0, reqs:], out[1:3, reqs:], out[3, reqs:] = len(boundaries) - 1, 0, size
    out[2, reqs : reqs + 1], out[3, reqs : reqs + 1] = size - count, count
    for column, values in zip(out, (rows, start, lengths, first), strict=False):
        column[:reqs] = values
    row, last = rows.long(), out[1] + out[2] - 1
    last[:num_decode] = start[:num_decode]
    page = out[1] // page_size * page_size
    base, target = out[4], out[5]
    base[:reqs], base[reqs:] = boundaries[row], 0
    # Only the steps of the warm-up begin at any position; their rows may have any boundary.
    base.copy_(torch.minimum(torch.maximum(base, page - page_size), page))
    torch.maximum(last // page_size * page_size, page, out=target)
    boundaries[row] = target[:reqs]


def copy_states(kept: Tensor, rows: Tensor, pages: Tensor, pool: Tensor, save: bool) -> None:
    """Copy the states of some rows to pages of a KV pool, or back.

    kept: int32 [R, W], the words of each row that a copy holds. rows: int32 [n], distinct. pages:
    int32 [n, P], the pages of each row's copy, distinct. pool: int32 [slices, pages, words], the
    storage of the pool, of which a page has `slices` parts. P * slices * words >= W. save: True
    writes the pages, False writes the rows. No host sync.
    """
    slices, _, words = pool.shape
    row, size = rows.long(), kept.shape[1]
    parts = pages.long().unsqueeze(2), torch.arange(slices, device=pool.device)
    if save:
        padded = kept.new_zeros(len(rows), pages.shape[1] * slices * words)
        padded[:, :size] = kept[row]
        pool[parts[1], parts[0]] = padded.view(*pages.shape, slices, words)
    else:
        kept[row] = pool[parts[1], parts[0]].flatten(1)[:, :size]
