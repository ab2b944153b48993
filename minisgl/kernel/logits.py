"""What some requests ask for around sampling: edited logits before it, log-probabilities after.

Plain torch on every device: rare, and away from the captured graphs.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class EditTensors:
    """core.LogitEdits on the device, indices into the N rows of logits.

    index, rows, position, prompt_len  int [E]: row of logits, line in the token pool, number of
                                       tokens in that line, and where the output begins.
    longest                            largest position, known to the host.
    """

    index: Tensor
    rows: Tensor
    position: Tensor
    prompt_len: Tensor
    frequency: Tensor
    presence: Tensor
    repetition: Tensor
    bias_index: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    longest: int


class TopLogprobs(NamedTuple):
    """chosen float32 [N]; ids int32 and values float32 [N, K], most likely first."""

    chosen: Tensor
    ids: Tensor
    values: Tensor


def edit_logits(logits: Tensor, edits: EditTensors, token_pool: Tensor) -> Tensor:
    """A copy of logits (float32 [N, V]) with bias, then repetition, then the other penalties.

    token_pool int32 [rows, positions] holds each line's prompt and output. No host sync.
    """
    edited = logits.clone()
    where = (edits.bias_index.long(), edits.bias_ids.long())
    edited.index_put_(where, edits.bias_values, accumulate=True)
    if not len(edits.index):
        return edited
    index = edits.index.long()
    seen = token_pool[edits.rows.long(), : edits.longest].long()
    column = torch.arange(edits.longest, device=logits.device)
    known = column < edits.position.unsqueeze(1)
    in_output = known & (column >= edits.prompt_len.unsqueeze(1))
    vocab_size = logits.shape[-1]
    anywhere = _counts(seen, known, vocab_size) > 0
    in_output_counts = _counts(seen, in_output, vocab_size)
    rows = edited[index]
    factor = edits.repetition.unsqueeze(1)
    repeated = torch.where(rows > 0, rows / factor, rows * factor)
    rows = torch.where(anywhere, repeated, rows)
    rows = rows - edits.frequency.unsqueeze(1) * in_output_counts
    rows = rows - edits.presence.unsqueeze(1) * (in_output_counts > 0)
    edited[index] = rows
    return edited


def _counts(ids: Tensor, valid: Tensor, vocab_size: int) -> Tensor:
    """float32 [E, V]: how often each id occurs in its line where `valid`."""
    counts = torch.zeros(len(ids), vocab_size + 1, device=ids.device)
    target = torch.where(valid, ids, vocab_size)  # the extra column collects what does not count
    counts.scatter_add_(1, target, torch.ones_like(target, dtype=counts.dtype))
    return counts[:, :vocab_size]


def top_logprobs(logits: Tensor, chosen: Tensor, count: int) -> TopLogprobs:
    """Log-softmax of logits (float32 [N, V]) at `chosen` (int [N]) and the `count` <= V largest."""
    norm = logits.logsumexp(dim=-1, keepdim=True)
    at_chosen = logits.gather(1, chosen.long().unsqueeze(1)) - norm
    values, ids = logits.topk(min(max(count, 1), logits.shape[-1]), dim=-1)
    return TopLogprobs(at_chosen.squeeze(1), ids[:, :count].int(), (values - norm)[:, :count])
