"""`PricedLengths`: the number of draft tokens that gives the most tokens per second."""

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from minisgl.core import StepWork
from minisgl.core.batch import DecodeLoad, DraftCounts, DraftLengths, Int32Array
from minisgl.core.config import DRAFT_WIDTHS

# The acceptance of a row is a weighted mean. Each later draft multiplies the weight by this factor.
_DECAY = 0.95
# A row counts as if this many drafts with the mean acceptance of all rows had been compared.
_PRIOR_DRAFTS = 4.0
_PROBE_STEPS = 16  # a draft head that does not pay makes one draft in this many steps
_ALL_DECAY = 0.999  # as _DECAY, for the mean acceptance of all rows
_MARGIN = 1.02  # drafts must be at least this much better than none


class PricedLengths(DraftLengths):
    """All ranks measure the same, and so choose alike.

    A row accepts each draft with a probability of its own, p, if it accepts all drafts before it. k
    drafts then give a row 1 + p + ... + p^k tokens. The step takes the k that gives the most
    tokens of all rows per second of predicted time. Each step compares at least one draft per row,
    so p is measured while steps have no drafts too.

    Steps have no drafts while prompts wait or are computed: these steps are limited by the work for
    each token, not by reading the weights, so a draft costs as much as a token of a prompt.

    first_acceptance: that of the first requests of a server. has_head: a draft head makes the
    drafts, which takes time (StepCost.per_draft_s).
    """

    first_acceptance: ClassVar[float] = 0.25
    has_head: ClassVar[bool] = False

    def __init__(self, rows: int) -> None:
        self._accepted = np.zeros(rows)
        self._compared = np.zeros(rows)
        self._all_compared = _PRIOR_DRAFTS
        self._all_accepted = self.first_acceptance * _PRIOR_DRAFTS

    def choose(self, step: DecodeLoad) -> DraftCounts:
        return DraftCounts(self.best(step), 0)

    def best(self, step: DecodeLoad) -> int:
        """Return the number of drafts up to step.limit that gives the most tokens per second."""
        rows, num_reqs, keys, limit, cost, _ = step
        if cost is None:
            return 0
        chance = self.acceptance(rows)
        work = StepWork(num_reqs, keys, 0, num_reqs)
        best, best_rate = 0, num_reqs / cost.predict_s(work) * _MARGIN
        for width in DRAFT_WIDTHS[1:]:
            if width > limit + 1:
                break
            drafted = ((1 - chance**width) / (1 - chance)).sum()
            tokens = float(drafted) + num_reqs - len(rows)
            drafts = width - 1 if self.has_head else 0
            work = StepWork(num_reqs * width, keys, 0, num_reqs, drafts)
            rate = tokens / cost.predict_s(work)
            if rate > best_rate:
                best, best_rate = width - 1, rate
        return best

    def acceptance(self, rows: Int32Array) -> NDArray[np.float64]:
        """Return the estimated probability with which each row accepts a draft, below 1."""
        mean = self._all_accepted / self._all_compared
        accepted = self._accepted[rows] + mean * _PRIOR_DRAFTS
        compared = self._compared[rows] + _PRIOR_DRAFTS
        return np.minimum(accepted / compared, 0.99)

    def open(self, row: int) -> None:
        self._accepted[row] = self._compared[row] = 0.0

    def record(
        self, rows: Int32Array, drafted: Int32Array, agreed: Int32Array, made: Int32Array
    ) -> None:
        # The first draft that disagrees was compared too. A row without a draft counts as one that
        # disagrees, because drafts would have given it nothing.
        compared = np.maximum(np.minimum(agreed + 1, drafted), 1)
        kept = _DECAY**compared
        self._accepted[rows] = self._accepted[rows] * kept + agreed
        self._compared[rows] = self._compared[rows] * kept + compared
        kept_of_all = _ALL_DECAY ** int(compared.sum())
        self._all_accepted = self._all_accepted * kept_of_all + int(agreed.sum())
        self._all_compared = self._all_compared * kept_of_all + int(compared.sum())


class HeadLengths(PricedLengths):
    """The lengths of an engine whose draft head makes drafts (drafts.HeadDrafts).

    A step makes as many drafts as pay, and the next step forwards them. Their acceptance is that
    of the rows for which the head has made drafts, because long n-gram matches replace these
    drafts only.

    The head has made none for the step after one with prompts, or if no drafts pay. Such a step
    can forward drafts of n-grams, whose acceptance is measured apart, as without a head.

    While no drafts pay, the head makes one draft in some steps, so that the acceptance is measured.
    The next step compares it with its token and does not forward it.
    """

    first_acceptance: ClassVar[float] = 0.6
    has_head: ClassVar[bool] = True

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self._ngrams = PricedLengths(rows)
        self._measured_steps = 0

    def choose(self, step: DecodeLoad) -> DraftCounts:
        best, turn = self.best(step), self._measured_steps % _PROBE_STEPS
        probes = step.limit > 0 and step.cost is not None and turn == 0
        forwarded = min(best, step.made) if step.made else self._ngrams.best(step)
        return DraftCounts(forwarded, max(best, int(probes)))

    def open(self, row: int) -> None:
        super().open(row)
        self._ngrams.open(row)

    def record(
        self, rows: Int32Array, drafted: Int32Array, agreed: Int32Array, made: Int32Array
    ) -> None:
        self._measured_steps += 1
        has, none = made > 0, made == 0
        super().record(rows[has], drafted[has], agreed[has], made[has])
        self._ngrams.record(rows[none], drafted[none], agreed[none], made[none])
