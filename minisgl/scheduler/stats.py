"""Sizes and durations of the forward steps, as running totals for SchedulerStats."""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable

from minisgl.core import Batch
from minisgl.message.stats import BATCH_SIZE_BOUNDS, BATCH_TOKENS_BOUNDS, STEP_PHASES, PhaseStats
from minisgl.scheduler.cost_fit import FREE, StepPrices


class StepMeter:
    """Counts the steps and sums their times.

    The scheduler calls `record_launch` at each launch and `record_result` at each result. Results
    come in the order of the launches. The time of a step begins at its launch, or at the end of the
    previous step if the two overlap, and ends at its result. The sum over all steps is therefore
    the time in which the device had work. The meter takes less than 1 us of host time per step.

    phases  the totals by phase (STEP_PHASES). The meter keeps counting in these objects; encode
            them to keep their values.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, prices: StepPrices = FREE
    ) -> None:
        """clock: returns seconds. prices: get the times that the device takes for steps."""
        self.clock, self.prices = clock, prices
        self.phases = {phase: PhaseStats() for phase in STEP_PHASES}
        self._launched_s: deque[float] = deque()
        self._own_s: deque[float | None] = deque()
        self._ended_s = 0.0
        self._decode_s: deque[float] = deque([0.0], maxlen=2)

    def record_launch(self, began_s: float, done: bool) -> None:
        """Record that a step has been launched.

        began_s: time before the launch. done: the step has ended within the launch, as on a CPU.
        """
        self._launched_s.append(began_s)
        self._own_s.append(self.clock() - began_s if done else None)

    def record_result(self, batch: Batch, by_graph: bool) -> None:
        """Record that the oldest launched step has completed. by_graph: a CUDA graph ran it.

        The device took the time of the launch if the step has ended in it, and the time since the
        end of the step before if the step was launched before this end. Otherwise the device may
        have waited for the launch. Prices do not contain the time of token masks.
        """
        now_s = self.clock()
        launched_s, own_s = self._launched_s.popleft(), self._own_s.popleft()
        duration_s = now_s - max(launched_s, self._ended_s)
        if own_s is None and launched_s < self._ended_s:
            own_s = duration_s
        if own_s is not None and batch.logit_edits is None:
            self.prices.record(batch.work(), own_s)
        self._ended_s = now_s
        chunk_tokens = batch.num_prefill_tokens
        tokens = batch.num_decode_tokens + chunk_tokens
        if not chunk_tokens:
            phase = self.phases["decode"]
            self._decode_s.append(duration_s)
        else:
            phase = self.phases["mixed" if batch.num_decode else "prefill"]
        phase.graph_steps += by_graph
        phase.eager_steps += not by_graph
        phase.seconds += duration_s
        phase.reqs += batch.num_reqs
        phase.tokens += tokens
        phase.reqs_counts[bisect_left(BATCH_SIZE_BOUNDS, batch.num_reqs)] += 1
        phase.tokens_counts[bisect_left(BATCH_TOKENS_BOUNDS, tokens)] += 1

    def remaining_s(self, predicted_s: float, of_decode: bool = True) -> float:
        """Estimate the seconds until the oldest step in flight ends; negative when it is late.

        predicted_s: predicted duration of the step. of_decode: the estimate uses the shortest of
        the prediction and the last two decode steps. It uses two steps because one measured time
        may be too long: the host may notice the end of a step late.
        """
        duration_s = min(predicted_s, *self._decode_s) if of_decode else predicted_s
        return self._ended_s + duration_s - self.clock()
