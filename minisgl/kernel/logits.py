"""Edits of logits before sampling, and log-probabilities after it.

Plain torch on every device: few requests need these functions, and they run outside of the CUDA
graphs. The exception is `apply_token_mask`, the reference of a Triton kernel, because all requests
of a step may have a mask.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.core.batch import Logprobs


@dataclass(frozen=True, slots=True, eq=False)
class PenaltyTensors:
    """Penalties of E rows of logits, on the device.

    index       int [E]; row of the logits.
    rows        int [E]; row of the token pool.
    position    int [E]; number of tokens in that row, prompt and output.
    prompt_len  int [E]; position of the first output token.
    frequency, presence, repetition
                float32 [E], as in core.SamplingParams.
    longest     the largest position, as a number on the host.
    """

    index: Tensor
    rows: Tensor
    position: Tensor
    prompt_len: Tensor
    frequency: Tensor
    presence: Tensor
    repetition: Tensor
    longest: int


def add_bias(logits: Tensor, index: Tensor, ids: Tensor, values: Tensor) -> None:
    """Add values (float32 [n]) to logits[index, ids] in place. No host sync.

    logits: float32 [N, V]; index, ids: int [n], in which a pair may occur several times.
    """
    logits.index_put_((index.long(), ids.long()), values, accumulate=True)


def apply_penalties(logits: Tensor, penalties: PenaltyTensors, token_pool: Tensor) -> None:
    """Apply the repetition penalty, then the other two, to logits (float32 [N, V]) in place.

    token_pool: int32 [rows, positions], prompt and output of each row. No host sync.
    Source of the repetition penalty: Keskar et al., CTRL, 2019, section 4.1.
    """
    index = penalties.index.long()
    seen = token_pool[penalties.rows.long(), : penalties.longest].long()
    column = torch.arange(penalties.longest, device=logits.device)
    known = column < penalties.position.unsqueeze(1)
    in_output = known & (column >= penalties.prompt_len.unsqueeze(1))
    vocab_size = logits.shape[-1]
    anywhere = _counts(seen, known, vocab_size) > 0
    in_output_counts = _counts(seen, in_output, vocab_size)
    rows = logits[index]
    factor = penalties.repetition.unsqueeze(1)
    repeated = torch.where(rows > 0, rows / factor, rows * factor)
    rows = torch.where(anywhere, repeated, rows)
    rows = rows - penalties.frequency.unsqueeze(1) * in_output_counts
    rows = rows - penalties.presence.unsqueeze(1) * (in_output_counts > 0)
    logits[index] = rows


def apply_token_mask(logits: Tensor, rows: Tensor, mask: Tensor, first_id: int) -> None:
    """Set the logits of forbidden ids to -inf in place. No host sync.

    logits: floats [N, n] of the ids from first_id on. rows: int32 [R], distinct rows of the logits.
    mask: int32 [R, W]; id i is allowed in rows[r] if bit i % 32 of mask[r, i // 32] is set. Ids
    from 32 * W on are forbidden. Rows that `rows` does not name stay unchanged.
    """
    ids = torch.arange(first_id, first_id + logits.shape[1], device=logits.device)
    words = torch.nn.functional.pad(mask, (0, 1))  # the added word forbids all its ids
    bits = words[:, (ids // 32).clamp(max=mask.shape[1])] >> (ids % 32)
    index = rows.long()
    logits[index] = logits[index].masked_fill(bits & 1 == 0, -torch.inf)


def _counts(ids: Tensor, valid: Tensor, vocab_size: int) -> Tensor:
    """Return float32 [E, V]: how often each id occurs in a row of `ids` where `valid` is set."""
    counts = torch.zeros(len(ids), vocab_size + 1, device=ids.device)
    target = torch.where(valid, ids, vocab_size)  # invalid ids are counted in the extra column
    counts.scatter_add_(1, target, torch.ones_like(target, dtype=counts.dtype))
    return counts[:, :vocab_size]


def top_logprobs(logits: Tensor, chosen: Tensor, count: int) -> Logprobs[Tensor]:
    """Return the log-softmax of logits (float32 [N, V]) at `chosen` and at the largest logits.

    chosen: int [N]; count: number of largest logits to report. K = min(count, V).
    """
    norm = logits.logsumexp(dim=-1, keepdim=True)
    at_chosen = logits.gather(1, chosen.long().unsqueeze(1)) - norm
    values, ids = logits.topk(min(max(count, 1), logits.shape[-1]), dim=-1)
    return Logprobs(at_chosen.squeeze(1), ids[:, :count].int(), (values - norm)[:, :count])
