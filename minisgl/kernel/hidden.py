"""Moves the final hidden states of a step by one token, for a draft head. Plain torch operations.

No function waits for the device, so a CUDA graph can capture it.
"""

import torch
from torch import Tensor

from minisgl.kernel.step import StepViews


def shift_hidden(
    ring: Tensor, hidden: Tensor, views: StepViews, lengths: Tensor, positions: Tensor
) -> Tensor:
    """Return the hidden state before each of the T tokens of a step, [T, H], and keep their own.

    The state before position 0 is zero. The state before the first token of a request is in the
    ring, where an earlier step has put it.

    ring: [R, W, H], the state of a row at position p in entry p % W; changed at the last W
    positions of each request. Row R - 1 is for padding. hidden: [T, H], the states of the tokens.
    lengths: int32 [B], the tokens of each request. positions: int32 [T].
    """
    depth, tokens = ring.shape[1], torch.arange(len(hidden), device=hidden.device)
    rows, first = views.rows.long(), views.first.long()
    of_token = torch.searchsorted(first, tokens, right=True) - 1
    before = hidden.roll(1, 0)
    entry = ((views.start - 1) % depth).long()
    is_first = (views.start == 0).unsqueeze(1)
    before[first] = torch.where(is_first, 0, ring[rows, entry])
    left = lengths[of_token] + first[of_token] - tokens
    to = torch.where(left <= depth, rows[of_token], len(ring) - 1)
    ring[to, (positions % depth).long()] = hidden
    return before
