"""What the forward steps held and how long they took, as running totals for SchedulerStats."""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable

import msgspec

from minisgl.core import Batch
from minisgl.message import BATCH_SIZE_BOUNDS, BATCH_TOKENS_BOUNDS, STEP_PHASES, PhaseStats


class StepMeter:
    """Told of each launch and of each result, in the same order; costs under 1 us per step.

    A step's time runs from its launch, or from the end of the step before where they overlap, to
    its result: the sum is the time in which the device had work.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._phases = {phase: PhaseStats() for phase in STEP_PHASES}
        self._launched_s: deque[float] = deque()
        self._ended_s = 0.0
        self._decode_s: deque[float] = deque([0.0], maxlen=2)

    def launched(self) -> None:
        """The next step begins."""
        self._launched_s.append(self.clock())

    def resolved(self, batch: Batch, by_graph: bool) -> None:
        """The oldest step that was launched has ended."""
        now_s, started_s = self.clock(), max(self._launched_s.popleft(), self._ended_s)
        self._ended_s = now_s
        reqs, chunk_tokens = batch.num_reqs, batch.num_prefill_tokens
        tokens = batch.num_decode_tokens + chunk_tokens
        name = "decode" if not chunk_tokens else "mixed" if batch.num_decode else "prefill"
        phase = self._phases[name]
        phase.graph_steps += by_graph
        phase.eager_steps += not by_graph
        phase.seconds += now_s - started_s
        if not chunk_tokens:
            self._decode_s.append(now_s - started_s)
        phase.reqs += reqs
        phase.tokens += tokens
        phase.reqs_counts[bisect_left(BATCH_SIZE_BOUNDS, reqs)] += 1
        phase.tokens_counts[bisect_left(BATCH_TOKENS_BOUNDS, tokens)] += 1

    def left_s(self, predicted_s: float) -> float:
        """Until the step after the one resolved last ends: as predicted, or sooner, if it is as
        short as one of the last two decode steps (both, since a host may see an end too late)."""
        return self._ended_s + min(predicted_s, *self._decode_s) - self.clock()

    def stats(self) -> dict[str, PhaseStats]:
        """A copy of the totals as of now, by phase."""
        return {
            name: msgspec.structs.replace(
                phase, reqs_counts=[*phase.reqs_counts], tokens_counts=[*phase.tokens_counts]
            )
            for name, phase in self._phases.items()
        }
