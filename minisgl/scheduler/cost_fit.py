"""`CostFit`: the step cost of a server, fitted to the steps that it runs."""

import logging
import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from minisgl.core import StepCost, StepWork
from minisgl.core.step_cost import shares_of
from minisgl.utils import log_event

logger = logging.getLogger(__name__)

ANNOUNCE_S = 0.25  # the shortest time between two announcements
ANNOUNCE_CHANGE = 0.03  # the smallest change of a price that is announced
LOG_S = 60.0  # the shortest time between two lines in the log
_CLOSE = 0.03  # a step that takes its predicted time within this fraction changes no price
_SLOW = 3.0  # a step is slow if it takes more than this many times its prediction
_SLOW_STEPS = 3  # slow steps in a row that count as disturbed
_MOST_CHANGE = math.log(1.25)  # of a price by one step
_BOUNDS = math.log(0.25), math.log(8.0)  # of a time, as factors of the first cost
_PRICE_BOUNDS = math.log(1 / 64), math.log(8.0)  # the same of the prices of keys and pairs
# Variances of the logarithms of the factors before the first step: of the factor that all of them
# share, of the own factor of a number of tokens, and of the own factor of a price.
_SHARED, _OWN, _PRICE = 2.0, 0.16, 0.5
_NEAR = 0.7  # correlation of the own factors of n and 2 n tokens
_SCATTER = 0.1  # relative deviation of the time of a step
_DRIFT = (0.05 * _SCATTER) ** 2 / _SHARED  # added to the covariance by each step, as a fraction


class CostFit:
    """Multiplies each time and price of a first cost by a factor, which it fits to measured steps.

    The method is recursive least squares in the logarithms of the factors, as an extended Kalman
    filter: each step moves the factors along their covariance, and the covariance shrinks for the
    factors that the step depends on. Before the first step, all factors have most of their variance
    in common. The factor of a number of tokens that no step had therefore follows the others, the
    nearest ones most. The covariance grows a little with each step, so later steps count more than
    earlier ones.

    _logs        float64 [N + 4]; logarithms of the factors: of the N times, of a decode key, of a
                 prefill pair, of a decode request and of a draft.
    _prices      the times and prices, which are the first cost times the factors.
    _covariance  float64 [N + 4, N + 4]; of _logs.
    """

    def __init__(self, first: StepCost) -> None:
        self._sizes = first.tokens
        n = len(self._sizes)
        prices = first.per_decode_key_s, first.per_prefill_pair_s
        terms = [*first.seconds, *prices, first.per_decode_req_s, first.per_draft_s]
        self._first = np.array(terms)
        self._prices: list[float] = terms
        octaves = np.log2(self._sizes)
        own = np.diag(np.full(len(terms), _PRICE))
        own[:n, :n] = _OWN * _NEAR ** abs(octaves[:, None] - octaves)
        self._logs = np.zeros(len(terms))
        self._covariance = _SHARED + own
        self._drift = _DRIFT * self._covariance
        low, high = np.full((2, len(terms)), np.array(_BOUNDS)[:, None])
        low[n:], high[n:] = _PRICE_BOUNDS
        self._low, self._high = low, high
        self._slow = 0
        self._announced = self._logged = np.full(len(terms), -math.inf)
        self._announced_s = self._logged_s = -math.inf

    def record(self, work: StepWork, seconds: float) -> None:
        """Take the measured time of a step."""
        indices, terms = self._terms(work)
        predicted_s = sum(terms)
        self._slow = self._slow + 1 if seconds > _SLOW * predicted_s else 0
        error = math.log(seconds / predicted_s)
        if 0 < self._slow <= _SLOW_STEPS or abs(error) < _CLOSE:
            return
        covariance = self._covariance
        covariance += self._drift
        shares = np.array(terms) / predicted_s
        along = covariance[:, indices] @ shares
        variance = float(along[indices] @ shares) + _SCATTER**2
        gain = along / variance
        # A part of the gain is a valid gain too, with another covariance after it.
        part = min(1.0, _MOST_CHANGE / (float(abs(gain).max()) * abs(error)))
        logs = self._logs + part * error * gain
        self._logs = logs.clip(self._low, self._high)
        covariance -= part * (2 - part) * variance * np.outer(gain, gain)
        self._prices = (self._first * np.exp(self._logs)).tolist()

    def news(self, now_s: float) -> StepCost | None:
        """Return the cost if all ranks have to change theirs now."""
        if now_s < self._announced_s + ANNOUNCE_S:
            return None
        self._announced_s = now_s
        if now_s >= self._logged_s + LOG_S and self._changed_since(self._logged):
            self._logged, self._logged_s = self._logs, now_s
            log_event(logger, logging.INFO, "step cost", cost=self.cost())
        if not self._changed_since(self._announced):
            return None
        self._announced = self._logs
        return self.cost()

    def _changed_since(self, logs: NDArray[np.float64]) -> bool:
        return bool(np.abs(self._logs - logs).max() >= math.log1p(ANNOUNCE_CHANGE))

    def cost(self) -> StepCost:
        """Return the present cost. Times rise with the tokens: the better known ones count more."""
        *seconds, per_key, per_pair, per_req, per_draft = self._prices
        n = len(self._sizes)
        weights = 1 / self._covariance.diagonal()[:n]
        return StepCost(
            tokens=self._sizes,
            seconds=tuple(_rising(seconds, weights.tolist())),
            per_decode_key_s=per_key,
            per_prefill_pair_s=per_pair,
            per_decode_req_s=per_req,
            per_draft_s=per_draft,
        )

    def _terms(self, work: StepWork) -> tuple[list[int], list[float]]:
        """Return the indices of the six prices of a step, and the seconds that each adds."""
        sizes, prices, n = self._sizes, self._prices, len(self._sizes)
        left, right, below, above = shares_of(work.tokens, sizes)
        terms = [below * prices[left], above * prices[right]]
        terms += [work.decode_keys * prices[n], work.prefill_pairs * prices[n + 1]]
        terms += [work.decode_reqs * prices[n + 2], work.next_drafts * prices[n + 3]]
        return [left, right, n, n + 1, n + 2, n + 3], terms


def _rising(values: Iterable[float], weights: Iterable[float]) -> list[float]:
    """Return the rising sequence that is nearest to `values`: falling runs become their mean."""
    runs: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        run = (value, weight, 1)
        while runs and runs[-1][0] > run[0]:
            before = runs.pop()
            total = before[1] + run[1]
            mean = (before[0] * before[1] + run[0] * run[1]) / total
            run = (mean, total, before[2] + run[2])
        runs.append(run)
    return [value for value, _, count in runs for _ in range(count)]
