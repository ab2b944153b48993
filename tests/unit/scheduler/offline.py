"""Runs a scheduler in simulated time, with all requests queued at once as `LLM` does."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from minisgl.benchmark.virtual_engine import DEFAULT_COST, EngineSettings, VirtualEngine, read_cost
from minisgl.core import SamplingParams, SchedulerConfig
from minisgl.core.batch import Batch, PendingStep
from minisgl.message.messages import AddReq, StepOutput
from minisgl.scheduler import LocalInbox, Scheduler

COST = read_cost(DEFAULT_COST)  # Qwen3-8B on one H200


class Size(NamedTuple):
    """The decoding requests and the prompt tokens of a step."""

    decode: int
    prompt: int


def size_of(batch: Batch) -> Size:
    return Size(batch.num_decode, len(batch.chunk_ids))


class Run(NamedTuple):
    """Sizes of the steps, seconds of all steps, and tokens of each request, the longest first."""

    sizes: list[Size]
    seconds: float
    generated: list[int]


class RecordingEngine(VirtualEngine):
    def __init__(self, rows: int) -> None:
        super().__init__(EngineSettings(COST, 20_000, rows, max_seq_len=16_384))
        self.sizes: list[Size] = []

    def launch(self, batch: Batch) -> PendingStep:
        self.sizes.append(size_of(batch))
        return super().launch(batch)


def run_offline(
    requests: Sequence[tuple[int, int]], *, even: bool, rows: int = 256, budget: int = 8192
) -> Run:
    """Run requests of (prompt tokens, output tokens), the longest outputs first.

    No two prompts share a prefix. even: the scheduler knows the step costs and makes even steps.
    Otherwise it computes prompts first, in chunks of the whole budget.
    """
    engine, inbox = RecordingEngine(rows), LocalInbox()
    generated = [0] * len(requests)

    def count(output: StepOutput) -> None:
        for uid in output.uids:
            generated[uid] += 1

    config = SchedulerConfig(prefill_budget_tokens=budget, target_step_ms=None)
    scheduler = Scheduler(
        engine, config, vocab_size=2**31 - 1, eos_token_ids=(), inbox=inbox, send=count
    )
    if even:
        scheduler.view.cost = COST
    for uid, (length, max_tokens) in enumerate(sorted(requests, key=lambda request: -request[1])):
        ids = np.full(length, uid, dtype="<i4").tobytes()
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0)
        inbox.messages.append(AddReq(uid=uid, token_ids=ids, sampling=sampling))
    while inbox.messages or not scheduler.idle:
        scheduler.iterate()
    return Run(engine.sizes, engine.busy_s, generated)
