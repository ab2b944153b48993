"""References of the sampling kernels: greedy, or a random draw by the Gumbel-max trick."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.kernel.random import gumbel_noise

GROUP = 16  # neighbouring ids that are drawn together before one of them is drawn
GROUP_STREAM = 1  # Philox stream of the noise of groups; the noise of single ids is stream 0


@dataclass(frozen=True, slots=True, eq=False)
class SamplingTensors:
    """Sampling parameters of N rows, on the device of the logits.

    temperature, top_k, top_p, min_p, seed
                [N], the columns of core.SAMPLING_COLUMNS. Temperature 0 is greedy; top_k below 1
                keeps all tokens.
    position    integers [N]; position of the sampled token.
    any_random  whether some row has a temperature above 0; known to the host.
    filters     whether some such row uses top_k, top_p or min_p; known to the host.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor
    any_random: bool
    filters: bool


class SampledTokens(NamedTuple):
    """tokens: int32 [N], always valid ids. finite: bool [N], False for unusable logits."""

    tokens: Tensor
    finite: Tensor


def sample(logits: Tensor, params: SamplingTensors) -> SampledTokens:
    """Sample one token for each row. logits: float32 [N, V], not changed; no host sync.

    A greedy row takes the first largest logit. A row with filters takes
    argmax(logits / temperature + gumbel(seed, position, id)) over the ids that pass the filters,
    which is an exact draw from the softmax (Gumbel 1954; Maddison et al. 2014). Any other random
    row first draws a group of ids in the same way, by the logsumexp of the group, and then an id of
    the group. This draw is exact as well, and needs a sixteenth of the random numbers.
    A row with NaN, with +inf or with only -inf is not finite; its token has no meaning.
    """
    plain = best_candidate(local_candidate(logits, params, 0).unsqueeze(0), params)
    if not params.filters:
        return plain
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / _divisors(params)
    noise = gumbel_noise(params.seed, params.position, logits.shape[-1])
    filtered = (params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0)
    filtered &= params.temperature > 0
    drawn = (_filter(scaled, params) + noise).argmax(dim=-1).int()
    return plain._replace(tokens=torch.where(filtered, drawn, plain.tokens))


def local_candidate(logits: Tensor, params: SamplingTensors, first_id: int) -> Tensor:
    """Return the best candidate of each row among the ids of one rank, without filters.

    logits: float32 [N, n] of the ids from first_id on, a multiple of GROUP; n > 0. Returns int32
    [N, 4]: an id, the largest logit of this part, the score of the id relative to that logit (both
    as bits of float32), and whether a logit of this part is NaN or +inf.
    """
    largest = logits.amax(dim=-1, keepdim=True)  # NaN if the row holds a NaN
    ids = logits.argmax(dim=-1)
    score = torch.zeros_like(largest)
    if params.any_random:
        drawn_rows = params.temperature > 0
        scaled = (logits - largest) / _divisors(params)  # at most 0, so it cannot overflow
        drawn, best = _draw(scaled, params, first_id)
        ids = torch.where(drawn_rows, drawn, ids)
        score[:, 0] = torch.where(drawn_rows, best, 0.0)
    bits = torch.cat((largest, score), dim=1).view(torch.int32)
    unusable = ~(largest < torch.inf)
    return torch.cat((ids.int().unsqueeze(1) + first_id, bits, unusable.int()), dim=1)


def best_candidate(candidates: Tensor, params: SamplingTensors) -> SampledTokens:
    """Return one token for each row: the best candidate of all ranks.

    Runs after local_candidate, which finds the candidate of one rank.

    candidates: int32 [ranks, N, 4], the results of local_candidate in rank order. Of equal scores
    the lower id wins. The result equals the result of `sample` over all logits, except between
    candidates whose scores differ only by rounding.
    """
    largest, score = candidates.view(torch.float32)[..., 1:3].unbind(-1)
    over = (largest - largest.amax(dim=0)) / _divisors(params).squeeze(1) + score
    score = torch.where(params.temperature > 0, over, largest)
    score = score.masked_fill(~(largest > -torch.inf), -torch.inf)
    tokens = candidates[..., 0].gather(0, score.argmax(dim=0, keepdim=True)).squeeze(0)
    finite = (candidates[..., 3] == 0).all(dim=0) & (largest > -torch.inf).any(dim=0)
    return SampledTokens(tokens, finite)


def _divisors(params: SamplingTensors) -> Tensor:
    return torch.where(params.temperature > 0, params.temperature, 1.0).unsqueeze(1)


def _draw(scaled: Tensor, params: SamplingTensors, first_id: int) -> tuple[Tensor, Tensor]:
    """Draw a column of each row. Returns it with the score of its group.

    scaled: [N, n] of the ids from first_id on.
    """
    padded = torch.nn.functional.pad(scaled, (0, -scaled.shape[-1] % GROUP), value=-torch.inf)
    groups = padded.view(len(padded), -1, GROUP)
    seed, position, begin = params.seed, params.position, first_id // GROUP
    noise = gumbel_noise(seed, position, groups.shape[1], first=begin, stream=GROUP_STREAM)
    score, group = (groups.logsumexp(-1) + noise).max(dim=-1)
    inside = groups[torch.arange(len(group), device=group.device), group]
    first = group * GROUP
    inside = inside + gumbel_noise(seed, position, GROUP, first=first_id + first)
    return first + inside.argmax(dim=-1), score


def _filter(scaled: Tensor, params: SamplingTensors) -> Tensor:
    """Set the logits that top_k, then top_p, then min_p drop to -inf.

    scaled: [N, V], the maximum of each row is 0. Each filter is a threshold on the logit, so tokens
    that tie with the last token kept are kept too, and the result does not depend on a sort order.
    The largest logit always stays.
    """
    vocab_size = scaled.shape[-1]
    ordered = scaled.sort(dim=-1, descending=True).values
    top_k = torch.where(params.top_k < 1, vocab_size, params.top_k).clamp(max=vocab_size)
    threshold = ordered.gather(1, top_k.long().unsqueeze(1) - 1)
    ordered = ordered.masked_fill(ordered < threshold, -torch.inf)
    probs = ordered.softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs  # probability of all more likely tokens
    kept = (before < params.top_p.unsqueeze(1)) | (params.top_p >= 1).unsqueeze(1)
    kept[:, 0] = True
    least_kept = ordered.masked_fill(~kept, torch.inf).amin(dim=-1, keepdim=True)
    threshold = torch.maximum(threshold, least_kept)
    threshold = torch.maximum(threshold, params.min_p.log().unsqueeze(1))
    return scaled.masked_fill(scaled < threshold, -torch.inf)
