"""Sizes and durations of the forward steps, as running totals for SchedulerStats."""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from minisgl.core.batch import Batch, PendingStep, StepResult
from minisgl.message.stats import BATCH_SIZE_BOUNDS, BATCH_TOKENS_BOUNDS, STEP_PHASES, PhaseStats
from minisgl.scheduler.cost_fit import CostFit


class InFlight(NamedTuple):
    """A launched step whose result the scheduler has not read.

    began_s   time before the launch.
    launch_s  the host time of the launch without its token masks.
    mask_s    the host time of the token masks in the launch.
    """

    batch: Batch
    pending: PendingStep
    began_s: float
    launch_s: float
    mask_s: float


class StepMeter:
    """Counts the steps and sums their times.

    The scheduler calls `record_result` at each result, in the order of the launches. The time of a
    step begins at its launch, or at the end of the previous step if the two overlap, and ends at
    its result. The sum over all steps is therefore the time in which the device had work.

    phases  the totals by phase (STEP_PHASES). The meter keeps counting in these objects; encode
            them to keep their values.
    decode_launch_s  host time of the launch of the last decode step without edits. With edits a
            launch may wait for the previous step.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, fits: Sequence[CostFit] = ()
    ) -> None:
        """clock: returns seconds. fits: get the times that the device takes for steps."""
        self.clock, self._fits = clock, fits
        self.phases = {phase: PhaseStats() for phase in STEP_PHASES}
        self.decode_launch_s = 0.0
        self._ended_s, self._ended_late = 0.0, False
        self._decode_s: deque[float] = deque([0.0], maxlen=2)

    def record_result(self, step: InFlight, result: StepResult) -> None:
        """Record that the oldest launched step has completed.

        The device took the time of the launch if the step has ended in it, and the time since the
        end of the step before if the step was launched before this end. Otherwise the device may
        have waited for the launch. The times contain no token masks: their share is known only if
        the step has ended in the launch. Steps that encode images count for no cost.

        The launch of a step with a chunk may take longer than the decode step before it. Then the
        host notices the end of the decode step late: that step seems long, and the next one short.
        So a step counts only if the host waited for its end and for the end before it.
        """
        batch, now_s = step.batch, self.clock()
        duration_s = now_s - max(step.began_s, self._ended_s)
        back_to_back = step.began_s < self._ended_s and not batch.logit_edits
        back_to_back = back_to_back and not (result.late or self._ended_late)
        if (result.ended_in_launch or back_to_back) and not batch.images:
            for fit in self._fits:
                fit.record(batch.work(), step.launch_s if result.ended_in_launch else duration_s)
        self._ended_s, self._ended_late = now_s, result.late
        reqs, tokens = len(batch.rows), int(batch.lengths.sum())
        if not len(batch.chunk_ids):
            phase = self.phases["decode"]
            self._decode_s.append(duration_s)
            if not batch.logit_edits:
                self.decode_launch_s = step.launch_s
        else:
            phase = self.phases["mixed" if batch.num_decode else "prefill"]
        phase.graph_steps += result.by_graph
        phase.eager_steps += not result.by_graph
        phase.seconds += duration_s
        phase.reqs += reqs
        phase.tokens += tokens
        phase.reqs_counts[bisect_left(BATCH_SIZE_BOUNDS, reqs)] += 1
        phase.tokens_counts[bisect_left(BATCH_TOKENS_BOUNDS, tokens)] += 1

    def remaining_s(self, predicted_s: float, of_decode: bool = True) -> float:
        """Estimate the seconds until the oldest step in flight ends; negative when it is late.

        predicted_s: predicted duration of the step. of_decode: the estimate uses the shortest of
        the prediction and the last two decode steps. It uses two steps because one measured time
        may be too long: the host may notice the end of a step late.
        """
        duration_s = min(predicted_s, *self._decode_s) if of_decode else predicted_s
        return self._ended_s + duration_s - self.clock()
