"""The real scheduler and prefix cache in virtual time: what a load gives, from the cost of a step.

The engine is replaced by a clock that a step moves by what StepCost says of it; a server logs the
cost of its machine when it starts ("step cost calibrated"). Beside the latencies stand the prefix
hits, which hardly depend on the times, and those of an ideal cache.
"""

import argparse
import heapq
import json
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from minisgl.benchmark.beside import streams_of, summarise_streams
from minisgl.benchmark.client import Answer
from minisgl.benchmark.flags import amount, whole
from minisgl.benchmark.latency import error_lines, summarise, table
from minisgl.benchmark.load import add_load_flags, load_of
from minisgl.benchmark.trace import Load, hit_ratios
from minisgl.core import (
    Batch,
    ConfigError,
    SamplingParams,
    SchedulerConfig,
    StepCost,
    StepResult,
)
from minisgl.message import AddReq, StepOutput, ToScheduler
from minisgl.scheduler import Scheduler

_HOST_S = 0.0003  # between the end of a step and the launch of the next but one
# Qwen3-8B, bfloat16, on one H200, as a server of bbc8025 logged it (2026-11-22).
DEFAULT_COST = (
    "35.88,1.3053,1:3.983,8:4.093,16:4.261,32:4.261,64:4.338,128:5.989,256:8.043,384:9.934,"
    "512:12.351,640:16.739,768:18.039,1024:23.674,2048:44.901"
)


def read_cost(text: str) -> StepCost:
    """What str() of a StepCost says. Raises ConfigError."""
    try:
        key_ns, pair_ns, *prices = text.split(",")
        points = [(int(tokens), float(ms) / 1e3) for tokens, ms in (p.split(":") for p in prices)]
        tokens, seconds = zip(*points, strict=True)
        figures = [float(key_ns), float(pair_ns), *seconds]
        rising = [*tokens] == sorted({*tokens}) and [*seconds] == sorted(seconds)
        if not (rising and tokens[0] > 0 and all(0 <= one < math.inf for one in figures)):
            raise ValueError
        return StepCost(
            tokens=tokens,
            seconds=seconds,
            per_decode_key_s=float(key_ns) / 1e9,
            per_prefill_pair_s=float(pair_ns) / 1e9,
        )
    except ValueError:
        raise ConfigError(f"--cost {text!r} is not KEY_NS,PAIR_NS,TOKENS:MS,...") from None


class _Pending:
    def __init__(self, engine: "VirtualEngine", batch: Batch, end_s: float) -> None:
        self._engine, self._reqs, self._end_s = engine, batch.num_reqs, end_s

    def wait(self) -> StepResult:
        self._engine.now_s = max(self._engine.now_s, self._end_s) + _HOST_S
        tokens, finite = np.ones(self._reqs, dtype=np.int32), np.ones(self._reqs, dtype=np.bool_)
        return StepResult(tokens, finite)

    def done(self) -> bool:
        return self._engine.now_s >= self._end_s


class VirtualEngine:
    """Implements core.EngineLike. now_s: virtual time; busy_s: what all steps took together."""

    def __init__(self, cost: StepCost, num_pages: int, rows: int, max_seq_len: int) -> None:
        self._cost = cost
        self.num_pages, self.page_size = num_pages, 16
        self.max_running_reqs, self.max_seq_len = rows, max_seq_len
        self.now_s = self.busy_s = self._free_s = 0.0

    def launch(self, batch: Batch) -> _Pending:
        lengths, n = batch.lengths.astype(np.int64), batch.num_decode
        keys = lengths * batch.start + lengths * (lengths + 1) // 2
        seconds = self._cost.predict_s(int(lengths.sum()), int(keys[:n].sum()), int(keys[n:].sum()))
        self.busy_s += seconds
        self._free_s = max(self.now_s, self._free_s) + seconds
        return _Pending(self, batch, self._free_s)


class _Arrivals:
    """Implements Inbox: requests in order of arrival. To wait for them moves the engine's clock."""

    def __init__(self, load: Load, engine: VirtualEngine, times_s: Sequence[float]) -> None:
        """times_s: when the first of `load` arrive, which is in order."""
        self._load, self._engine = load, engine
        self.due = [(due_s, index) for index, due_s in enumerate(times_s)]
        heapq.heapify(self.due)
        self.sent_s: dict[int, float] = {}

    def add(self) -> None:
        """One more arrives now, if there is one."""
        index = len(self.sent_s) + len(self.due)
        if index < len(self._load.prompts):
            heapq.heappush(self.due, (self._engine.now_s, index))

    def receive(self, wait_s: float | None, plan_hash: int | None = None) -> list[ToScheduler]:
        engine, messages = self._engine, list[ToScheduler]()
        end_s = math.inf if wait_s is None else engine.now_s + wait_s
        engine.now_s = max(engine.now_s, min([end_s, *(due_s for due_s, _ in self.due[:1])]))
        while self.due and self.due[0][0] <= engine.now_s:
            self._send(messages)
        return messages

    def _send(self, messages: list[ToScheduler]) -> None:
        due_s, index = heapq.heappop(self.due)
        self.sent_s[index] = due_s
        most = self._load.max_tokens[index]
        sampling = SamplingParams(max_tokens=most, ignore_eos=True, seed=0)
        ids = self._load.prompts[index].astype("<i4").tobytes()
        messages.append(AddReq(uid=index, token_ids=ids, sampling=sampling))


def simulate(
    load: Load, engine: VirtualEngine, cost: StepCost, config: SchedulerConfig, concurrency: int
) -> list[Answer]:
    """The answers to `load`, in order; `concurrency` at a time where it has no arrivals."""
    answers = [Answer(0.0, prompt_tokens=len(prompt)) for prompt in load.prompts]
    arrivals = _Arrivals(load, engine, load.arrivals_s or [0.0] * min(concurrency, len(answers)))
    outbox = deque[StepOutput]()
    scheduler = Scheduler(
        engine,
        config,
        vocab_size=2**31 - 1,
        eos_token_ids=(),
        inbox=arrivals,
        send=outbox.append,
        clock=lambda: engine.now_s,
    )
    scheduler.planner.cost = cost
    while arrivals.due or not scheduler.idle:
        scheduler.iterate()
        while outbox:
            output = outbox.popleft()
            for done in output.prefill_done:
                answers[done.uid].cached_tokens = done.cached_tokens
            for uid in output.uids:
                answers[uid].outputs_s.append(engine.now_s)
                answers[uid].output_tokens += 1
            for finished in output.finished:
                answers[finished.uid].error = finished.error
                arrivals.add()
    for uid, sent_s in arrivals.sent_s.items():
        answers[uid].sent_s = sent_s
    return answers


def main(argv: Sequence[str]) -> int:
    """Print a table and one line of JSON."""
    parser = argparse.ArgumentParser(prog="minisgl bench simulate", description=__doc__)
    parser.add_argument(
        "--cost",
        default=DEFAULT_COST,
        metavar="KEY_NS,PAIR_NS,TOKENS:MS,...",
        help="of a step, as logged by a server (Qwen3-8B on one H200)",
    )
    parser.add_argument("--num-pages", type=whole, default=49_000, help="of 16 tokens (49000)")
    parser.add_argument("--max-running-requests", type=whole, default=256)
    parser.add_argument("--max-seq-len", type=whole, default=40_960)
    parser.add_argument("--target-step-ms", type=amount, default=SchedulerConfig().target_step_ms)
    parser.add_argument("--cache-type", choices=("radix", "naive"), default="radix")
    add_load_flags(parser)
    options = parser.parse_args(argv)
    cost = read_cost(options.cost)
    config = SchedulerConfig(
        target_step_ms=options.target_step_ms or None, cache_type=options.cache_type
    )
    sizes = (options.num_pages, options.max_running_requests, options.max_seq_len)
    engine = VirtualEngine(cost, *sizes)
    load, beside = load_of(options), streams_of(options)
    both = load
    if beside.prompts:
        if load.arrivals_s is None:
            raise ConfigError("--beside is simulated with --rate or --trace only")
        alone = simulate(beside, VirtualEngine(cost, *sizes), cost, config, 1)
        if alone[0].error:
            raise ConfigError(f"--beside: {alone[0].error}")
        begin_s = max(answer.outputs_s[0] for answer in alone)
        both = Load(
            beside.prompts + load.prompts,
            beside.max_tokens + load.max_tokens,
            [0.0] * len(alone) + [begin_s + at_s for at_s in load.arrivals_s],
        )
    answers = simulate(both, engine, cost, config, options.concurrency)
    streams, answers = answers[: len(beside.prompts)], answers[len(beside.prompts) :]
    summary: dict[str, Any] = summarise(answers)
    if streams:
        summary["beside"] = summarise_streams(beside, streams, answers)
        summary["failed"] += summary["beside"]["failed"]
    print(table(summary), *error_lines([*streams, *answers]), sep="\n")
    summary |= hit_ratios(load.prompts, engine.num_pages, engine.page_size)
    print(json.dumps(summary | {"busy_s": engine.busy_s}))
    return 1 if summary["failed"] else 0
