"""The predicted time of a step: a formula cheap enough to evaluate several times in each step."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

_FEW_SIZES = (16, 64, 256, 1024)  # where padding costs no time


def step_sizes(largest: int, host_bound: int = 0) -> list[int]:
    """Return the preferred sizes, in tokens, of a step with prompt tokens.

    largest: the limit. host_bound: up to this number of tokens, launching a step takes longer than
    computing it. Padding below it costs no time, so the largest size up to host_bound, and a few
    smaller ones, replace all sizes up to host_bound.

    Matrix kernels compute whole tiles of rows. Above 256 rows a tile has 128 rows, so 448 tokens
    take as long as 512. The distance between two sizes grows with the size. On a GPU, steps of up
    to 4,096 tokens are padded to the sizes of graphs (engine.step.PiecewiseStep), so a chunk should
    fill one of them. The scheduler does not know host_bound. It also fills the sizes that it
    replaces, which costs no time.
    """
    sizes = [16, 32, *range(64, 384, 64), *range(384, 1024, 128), *range(1024, 2048, 256)]
    sizes += range(2048, largest + 1, 512)
    sizes = [size for size in sizes if size <= largest]
    last_free = max((size for size in sizes if size <= host_bound), default=0)
    return [size for size in sizes if size >= last_free or size in _FEW_SIZES]


class StepWork(NamedTuple):
    """The work of one step, as StepCost.predict_s counts it."""

    tokens: int
    decode_keys: int = 0
    prefill_pairs: int = 0
    decode_reqs: int = 0
    next_drafts: int = 0


def shares_of(tokens: int, sizes: Sequence[int]) -> tuple[int, int, float, float]:
    """Return the indices of two sizes in rising order, and the shares of their times.

    The sum of the two shares of the times is the time of a step with `tokens` tokens. It is linear
    between two sizes, and proportional beyond the largest size.
    """
    right = min(bisect_left(sizes, tokens), len(sizes) - 1)
    left = max(right - 1, 0)
    if tokens >= sizes[-1]:
        return left, right, 0.0, tokens / sizes[-1]
    share = 1.0 if left == right else (tokens - sizes[left]) / (sizes[right] - sizes[left])
    return left, right, 1.0 - share, share


class TimedStep(NamedTuple):
    """The measured time of a step nearly without context."""

    tokens: int
    seconds: float


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Predicts the time of one forward step.

    tokens              numbers of tokens in a step, decode and prefill together, in rising order.
    seconds             the time of a step with each of these numbers of tokens, without attention.
                        No time is smaller than the time before it.
    per_decode_key_s    seconds for each key that a decode request attends to. The number of keys is
                        the length of its context.
    per_prefill_pair_s  seconds for each pair of query token and key of a chunk. A chunk has about
                        length * (start + length / 2) pairs. A pair costs about a fiftieth of a
                        decode key on a GPU, because all tokens of a chunk share its keys.
    per_decode_req_s    seconds for each decode request, beside its tokens: those in which a step
                        reads its recurrent states. 0 for a model without states.
    per_draft_s         seconds for each draft that the draft head makes for all decode requests
                        together. 0 for a model without a draft head.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    per_decode_key_s: float
    per_prefill_pair_s: float
    per_decode_req_s: float = 0.0
    per_draft_s: float = 0.0

    def predict_s(self, work: StepWork) -> float:
        """Return the predicted seconds of a step; 0.0 for 0 tokens, since no step is launched."""
        tokens, keys, pairs, reqs, drafts = work
        if tokens == 0:
            return 0.0
        left, right, below, above = shares_of(tokens, self.tokens)
        linear_s = below * self.seconds[left] + above * self.seconds[right]
        attention_s = self.per_decode_key_s * keys + self.per_prefill_pair_s * pairs
        return linear_s + attention_s + self.per_decode_req_s * reqs + self.per_draft_s * drafts

    def __str__(self) -> str:
        """Return "KEY_NS,PAIR_NS,TOKENS:MS,...", as in the log and in `minisgl bench fleet`.

        With recurrent states or a draft head, REQ_NS follows PAIR_NS. With a draft head, DRAFT_NS
        follows REQ_NS.
        """
        terms = [f"{self.per_decode_key_s * 1e9:.2f}", f"{self.per_prefill_pair_s * 1e9:.4f}"]
        if self.per_decode_req_s or self.per_draft_s:
            terms.append(f"{self.per_decode_req_s * 1e9:.0f}")
        if self.per_draft_s:
            terms.append(f"{self.per_draft_s * 1e9:.0f}")
        sizes = zip(self.tokens, self.seconds, strict=True)
        return ",".join(terms + [f"{tokens}:{seconds * 1e3:.3f}" for tokens, seconds in sizes])


# Steps take no time, so no time limit holds prompt tokens back. Each token after the first one adds
# the same time, so even steps (scheduler/budget.py) save none.
FREE_STEPS = StepCost(
    tokens=(1, 1_000_000),
    seconds=(1e-15, 1e-6),
    per_decode_key_s=0.0,
    per_prefill_pair_s=0.0,
)
