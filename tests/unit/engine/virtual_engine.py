"""An engine in virtual time, whose steps take the time of a known cost."""

from collections.abc import Callable

import numpy as np

from minisgl.core import StepCost, StepWork
from minisgl.core.batch import Batch, StepResult

TRUE = StepCost(
    tokens=(1, 64, 128, 512, 1024),
    seconds=(0.0044, 0.0048, 0.0052, 0.0118, 0.0232),
    per_decode_key_s=4e-8,
    per_prefill_pair_s=1e-9,
)


class VirtualPending:
    def __init__(self, engine: "VirtualEngine", end_ns: int) -> None:
        self._engine, self._end_ns = engine, end_ns

    def done(self) -> bool:
        return self._engine.now_ns >= self._end_ns

    def wait(self) -> StepResult:
        self._engine.now_ns = max(self._engine.now_ns, self._end_ns)
        return StepResult(np.zeros((0, 1), np.int32), np.zeros(0, np.int32), np.zeros(0, np.bool_))


class VirtualEngine:
    """Steps run one after the other. Each takes the time of TRUE, times a factor from `disturb`."""

    num_pages, page_size, max_running_reqs, max_seq_len = 1000, 16, 256, 40_960
    window, snapshot_pages = None, 0
    copier = images = None

    def __init__(self, disturb: Callable[[int, int], float] = lambda tokens, launch: 1.0) -> None:
        self.now_ns = self.free_ns = self.launches = 0
        self.disturb = disturb

    def launch(self, batch: Batch) -> VirtualPending:
        n, lengths = batch.num_decode, batch.lengths.astype(np.int64)
        tokens, keys = int(lengths.sum()), int((batch.start + lengths)[:n].sum())
        pairs = (lengths * batch.start + lengths * (lengths + 1) // 2)[n:]
        seconds = TRUE.predict_s(StepWork(tokens, keys, int(pairs.sum())))
        self.launches += 1
        duration_ns = round(1e9 * seconds * self.disturb(tokens, self.launches))
        self.free_ns = max(self.now_ns, self.free_ns) + duration_ns
        return VirtualPending(self, self.free_ns)
