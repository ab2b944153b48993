"""Drafts from the tokens of a row (n-grams), and their verification: the torch references.

accept_drafts does not wait for the device, so a CUDA graph can capture it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MAX_MATCH = 32  # a match compares up to this many of a row's last tokens
MIN_MATCH = 2  # a shorter match gives no draft
LONG_MATCH = 8  # a shorter match does not replace drafts that a draft head has made


def find_drafts(
    token_pool: Tensor,
    rows: Tensor,
    cached: Tensor,
    tails: Tensor,
    lengths: Tensor,
    width: int,
    found: Tensor,
    predicted: Tensor,
    made: Tensor | None = None,
) -> None:
    """Continue the best match of each row's end, and write it as drafts after the row's end.

    A row has the tokens 0 to cached[row]. From column tails[row] on it has the prediction of the
    client. The search leaves out its tokens up to position cached[row] + width, because output or
    drafts may overwrite them: a second search finds the same drafts. A match is an earlier place in
    the row, or a place in the rest of the prediction, with the same tokens as the end of the row:
    MIN_MATCH to MAX_MATCH of them. The longest match counts, and of equally long ones the last. Of
    two equally long ones, the match in the prediction therefore counts. The drafts are the tokens
    after the match. If too few tokens follow it, up to the end of the row or of the prediction,
    they repeat.
    Source: prompt lookup decoding (Saxena 2023).

    token_pool: int32 [R, max_seq_len + 1], changed at positions cached[row] + 1 to
    cached[row] + lengths, as far as they are in the pool.
    rows: int32 [B]. cached: int32 [R]. lengths: int32 [B], from 1 to width.
    tails: int32 [R]; max_seq_len + 1 for a row without a prediction.
    found: int32 [B], overwritten with the number of drafts: lengths, or 0 without a match. Drafts
    of a row without a match are its last token.
    predicted: int32 [B], overwritten with 1 if the drafts come from the prediction, or 0.
    made: int32 [R] or None; the drafts that a draft head has already written after each row's end.
    Where it has made some, they stay unless the match has LONG_MATCH tokens, and found counts them,
    up to lengths.
    """
    columns = token_pool.shape[1]
    row, last = rows.long(), cached[rows.long()].long()
    tokens = token_pool[row]
    tail = torch.maximum(tails[row].long(), last + 1 + width)
    ends = torch.arange(columns, device=tokens.device)
    searched = (ends < last.unsqueeze(1)) | ((ends >= tail.unsqueeze(1)) & (ends < columns - 1))
    newest = tokens.gather(1, last.unsqueeze(1))
    req, end = (searched & (tokens == newest)).nonzero(as_tuple=True)
    back = torch.arange(MAX_MATCH, device=tokens.device)
    longest = torch.minimum(end - torch.where(end < tail[req], 0, tail[req]), last[req])
    before = tokens[req.unsqueeze(1), (end.unsqueeze(1) - back).clamp(min=0)]
    wanted = tokens.gather(1, (last.unsqueeze(1) - back).clamp(min=0))[req]
    size = ((before == wanted) & (back <= longest.unsqueeze(1))).long().cumprod(dim=1).sum(dim=1)
    least: Tensor | int = MIN_MATCH
    if made is not None:
        least = torch.where(made[row[req]] > 0, LONG_MATCH, MIN_MATCH)
    score = torch.where(size >= least, size * columns + end, -1)
    best = torch.full_like(last, -1).scatter_reduce(0, req, score, "amax")
    has_match, best = best >= 0, best.clamp(min=0) % columns
    in_tail = has_match & (best > last)
    period = torch.where(has_match, torch.where(in_tail, columns - 1, last) - best, 1)
    nth = torch.arange(width, device=tokens.device)
    source = torch.where(has_match, best + 1, last).unsqueeze(1) + nth % period.unsqueeze(1)
    target = last.unsqueeze(1) + 1 + nth
    written = (nth < lengths.unsqueeze(1)) & (target < columns)
    target = torch.where(written, target, last.unsqueeze(1))  # writes the last token again
    drafts = torch.where(written, tokens.gather(1, source), tokens.gather(1, last.unsqueeze(1)))
    without: Tensor | int = 0
    if made is not None:
        drafts = torch.where(has_match.unsqueeze(1), drafts, tokens.gather(1, target))
        without = torch.minimum(made[row], lengths)
    token_pool[row.unsqueeze(1), target] = drafts
    found.copy_(torch.where(has_match, lengths, without))
    predicted.copy_(in_tail)


class Accepted(NamedTuple):
    """The tokens that a step adds to its requests.

    tokens   int32 [B, width]; the sampled tokens of each request, the first `counts` valid.
    counts   int32 [B]; 0 for a request that does not sample.
    agreed   int32 [B]; drafts, counted from the first, that equal the sampled tokens.
    finite   bool [B]; whether the logits of the first token are finite.
    """

    tokens: Tensor
    counts: Tensor
    agreed: Tensor
    finite: Tensor


def accept_drafts(
    token_pool: Tensor,
    rows: Tensor,
    cached: Tensor,
    lengths: Tensor,
    samples: Tensor,
    found: Tensor,
    first: Tensor,
    drawn: Tensor,
    finite: Tensor,
    num_decode: int,
    width: int,
) -> Accepted:
    """Accept drafts while they equal the drawn tokens, and write the accepted tokens to the pool.

    Each position is drawn with its own noise (docs/decisions/04-keyed-draws.md). If the tokens
    before a position are those of decoding without drafts, so is the draw of the position. So a
    request gets the draws up to the first one that differs from its draft, this one included. It
    gets no draw from logits that are not finite, except as its first token: the caller then fails
    it.

    token_pool: int32 [R, max_seq_len + 1]; changed at the positions of the new tokens.
    rows, lengths, samples: int32 [B], as in StepViews; the first num_decode requests decode.
    cached: int32 [R]; tokens of a row in the KV cache before the step. Overwritten with their
    number after it: a decode request adds `counts`, a chunk adds its length.
    found: int32 [num_decode], from find_drafts.
    first: int32 [B]; the index in `drawn` of each request's first draw. A decode request has
    `lengths` draws, a chunk has one.
    drawn: int32 [M]; finite: bool [M].
    """
    reqs = len(rows)
    row, nth = rows.long(), torch.arange(width, device=rows.device)
    decodes = torch.arange(reqs, device=rows.device) < num_decode
    draws = torch.where(decodes, lengths, 1)
    index = (first.unsqueeze(1) + torch.minimum(nth, draws.unsqueeze(1) - 1)).long()
    tokens, usable = drawn[index], finite[index]
    start = cached[row]
    columns = token_pool.shape[1] - 1
    position = (start + torch.where(decodes, 1, lengths)).unsqueeze(1) + nth
    drafts = token_pool[row.unsqueeze(1), position.clamp(max=columns).long()]
    drafted = torch.zeros_like(rows)
    drafted[:num_decode] = found
    equal = (tokens == drafts) & (nth < drafted.unsqueeze(1)) & (nth < draws.unsqueeze(1))
    agreed = equal.long().cumprod(dim=1).sum(dim=1)
    follows = equal[:, :-1] & usable[:, 1:] & (nth[1:] < draws.unsqueeze(1))
    counts = 1 + follows.long().cumprod(dim=1).sum(dim=1)
    counts = torch.where(samples != 0, counts, 0)
    kept = nth < counts.unsqueeze(1)
    safe = torch.where(kept, position, position[:, :1]).clamp(max=columns).long()
    unchanged = token_pool[row.unsqueeze(1), safe]
    firsts = torch.where(kept[:, :1], tokens[:, :1], unchanged[:, :1])
    token_pool[row.unsqueeze(1), safe] = torch.where(kept, tokens, firsts)
    cached[row] = start + torch.where(decodes, counts, lengths).int()
    return Accepted(tokens, counts.int(), agreed.int(), usable[:, 0])
