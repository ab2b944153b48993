"""CPU time of the scheduler, with an engine that does no work.

Four times are measured: one decode step with 256 running requests; the same while 1,000 requests
of 8 clients wait for a row; one request from its admission to its end, with a prompt of 8,192
tokens of which half is cached; and one eviction from a radix tree of 100,000 nodes.
"""

import argparse
import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from bench.failures import raise_failure
from minisgl.benchmark.flag_types import positive_int
from minisgl.benchmark.text_table import TextTable
from minisgl.benchmark.virtual_engine import DEFAULT_COST, read_cost
from minisgl.core import SamplingParams, SchedulerConfig
from minisgl.core.batch import Batch, StepResult, WindowLayers
from minisgl.core.images import ImageLimits
from minisgl.core.page_copier import PageCopier
from minisgl.core.rows import Steps
from minisgl.kvcache.radix import RadixCache
from minisgl.message.messages import AddReq, StepOutput
from minisgl.scheduler import LocalInbox, Scheduler
from minisgl.utils.startup import Progress

VOCAB = 32_000
PAGE_SIZE = 16
DEFAULT_CONFIG = SchedulerConfig(prefill_budget_tokens=16_384, target_step_ms=None)


class HostTime(NamedTuple):
    """CPU seconds of one operation. aim_s: the upper limit that the median should not exceed."""

    name: str
    samples: int
    median_s: float
    p99_s: float
    aim_s: float


class _IdleEngine:
    """Implements core.EngineLike; every sampled token is the same."""

    def __init__(self, num_pages: int, max_running_reqs: int, max_seq_len: int) -> None:
        self.num_pages = num_pages
        self.page_size = PAGE_SIZE
        self.window: WindowLayers | None = None
        self.snapshot_pages = 0
        self.copier: PageCopier | None = None
        self.images: ImageLimits | None = None
        self.max_running_reqs = max_running_reqs
        self.max_seq_len = max_seq_len

    def launch(self, batch: Batch) -> "_Done":
        return _Done(len(batch.rows))


class _Done:
    """Implements core.PendingStep; its result is available at once."""

    def __init__(self, num_reqs: int) -> None:
        ones = np.ones(num_reqs, dtype=np.int32)
        self._result = StepResult(ones[:, None], ones, np.ones(num_reqs, dtype=np.bool_))

    def wait(self) -> StepResult:
        return self._result

    def done(self) -> bool:
        return True


def measure_decode(num_reqs: int, steps: int, show: bool = True) -> HostTime:
    """Measure steps in which `num_reqs` requests decode, with page growth and messages."""
    engine = _IdleEngine(num_reqs * 80, num_reqs, 4096)
    scheduler, inbox, outbox = _scheduler(engine)
    for uid in range(num_reqs):
        prompt = np.random.default_rng(uid).integers(0, VOCAB, 100, dtype=np.int32)
        inbox.messages.append(_request(uid, prompt, max_tokens=steps + 50))
    while len(scheduler.view.decode_rows) < num_reqs:
        scheduler.iterate()
    seconds = _timed(scheduler.iterate, steps, "decode steps", show)
    outbox.clear()
    return _figure(f"decode step, {num_reqs} requests", seconds, aim_s=0.1e-3)


def measure_waiting(num_reqs: int, waiting: int, steps: int, show: bool = True) -> HostTime:
    """Measure steps as in `measure_decode` while `waiting` requests of 8 clients find no row.

    The scheduler predicts step times, and has a target for them, as in a server.
    """
    pages = -(-(100 + steps + 300) // PAGE_SIZE)
    engine = _IdleEngine(num_reqs * pages, num_reqs, 100 + steps + 300)
    scheduler, inbox, outbox = _scheduler(engine, SchedulerConfig())
    scheduler.view.cost = read_cost(DEFAULT_COST)
    prompts = np.random.default_rng(0).integers(0, VOCAB, (num_reqs + waiting, 100), dtype=np.int32)

    def add(uids: range) -> None:
        for uid in uids:
            request = _request(uid, prompts[uid], max_tokens=steps + 200)
            named = {"client": f"client-{uid % 8}", "call": uid}
            inbox.messages.append(msgspec.structs.replace(request, **named))

    add(range(num_reqs))
    while len(scheduler.view.decode_rows) < num_reqs:
        scheduler.iterate()
    add(range(num_reqs, num_reqs + waiting))
    scheduler.iterate()
    seconds = _timed(scheduler.iterate, steps, "decode steps, others wait", show)
    if len(scheduler.view.waiting) != waiting or len(scheduler.view.decode_rows) != num_reqs:
        raise RuntimeError(f"{len(scheduler.view.waiting)} requests wait, expected {waiting}")
    outbox.clear()
    name = f"decode step, {num_reqs} requests, {waiting:,} wait"
    return _figure(name, seconds, aim_s=0.25e-3)


def measure_admission(num_prompts: int, show: bool = True) -> HostTime:
    """Measure requests of one output token, whose prompts of 8,192 tokens are half cached."""
    length = 8192
    engine = _IdleEngine((num_prompts + 2) * length // PAGE_SIZE, 4, length + 64)
    scheduler, inbox, _ = _scheduler(engine)
    rng = np.random.default_rng(0)
    shared = rng.integers(0, VOCAB, length // 2, dtype=np.int32)
    inbox.messages.append(_request(0, shared, max_tokens=1))
    _until_idle(scheduler, inbox)
    uids = iter(range(1, num_prompts + 1))

    def admit_one() -> None:
        own = rng.integers(0, VOCAB, length // 2, dtype=np.int32)
        inbox.messages.append(_request(next(uids), np.concatenate([shared, own]), max_tokens=1))
        _until_idle(scheduler, inbox)

    seconds = _timed(admit_one, num_prompts, "admissions", show)
    totals = scheduler.totals
    expected = num_prompts * length // 2
    if totals.cached_tokens_total != expected:
        raise RuntimeError(f"{totals.cached_tokens_total} cached tokens, expected {expected}")
    return _figure("request with an 8,192-token prompt, half cached", seconds, aim_s=1e-3)


def measure_eviction(num_nodes: int, evictions: int, show: bool = True) -> HostTime:
    """Measure evictions of one page each from a tree of `num_nodes` nodes."""
    cache = RadixCache(PAGE_SIZE, Steps())
    rng = np.random.default_rng(0)
    heads = rng.integers(0, VOCAB, (num_nodes // 100 + 1, PAGE_SIZE), dtype=np.int32)
    for node in Progress(range(num_nodes), desc="nodes", disable=not show):
        tail = rng.integers(0, VOCAB, PAGE_SIZE, dtype=np.int32)
        key = np.concatenate([heads[node % len(heads)], tail])
        cache.insert(key, np.array([2 * node, 2 * node + 1], dtype=np.int32))
    seconds = _timed(lambda: cache.evict(1), evictions, "evictions", show)
    return _figure(f"eviction, {num_nodes:,} nodes", seconds, aim_s=20e-6)


def _scheduler(
    engine: _IdleEngine, config: SchedulerConfig = DEFAULT_CONFIG
) -> tuple[Scheduler, LocalInbox, deque[StepOutput]]:
    inbox, outbox = LocalInbox(), deque[StepOutput]()

    def send(output: StepOutput) -> None:
        raise_failure(output)
        outbox.append(output)

    scheduler = Scheduler(
        engine,
        config,
        vocab_size=VOCAB,
        eos_token_ids=(0,),
        inbox=inbox,
        send=send,
    )
    return scheduler, inbox, outbox


def _request(
    uid: int, prompt: "np.ndarray[tuple[int], np.dtype[np.int32]]", max_tokens: int
) -> AddReq:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=uid)
    return AddReq(uid=uid, token_ids=prompt.astype("<i4").tobytes(), sampling=sampling)


def _until_idle(scheduler: Scheduler, inbox: LocalInbox) -> None:
    while inbox.messages or not scheduler.idle:
        scheduler.iterate()


def _timed(
    operation: Callable[[], object], count: int, description: str, show: bool
) -> list[float]:
    """Return the CPU seconds of this process for each of `count` calls."""
    seconds = []
    for _ in Progress(range(count), desc=description, disable=not show):
        begin = time.process_time_ns()
        operation()
        seconds.append((time.process_time_ns() - begin) / 1e9)
    return seconds


def _figure(name: str, seconds: list[float], aim_s: float) -> HostTime:
    p99 = float(np.percentile(seconds, 99))
    return HostTime(name, len(seconds), statistics.median(seconds), p99, aim_s)


def main(argv: Sequence[str]) -> int:
    """Print a table and one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench scheduler", description=__doc__)
    parser.add_argument("--running", type=positive_int, default=256, help="decoding requests (256)")
    parser.add_argument(
        "--waiting", type=positive_int, default=1000, help="waiting requests (1000)"
    )
    parser.add_argument("--steps", type=positive_int, default=1000, help="decode steps (1000)")
    parser.add_argument("--prompts", type=positive_int, default=200, help="admitted requests (200)")
    parser.add_argument("--nodes", type=positive_int, default=100_000, help="radix nodes (100000)")
    parser.add_argument("--evictions", type=positive_int, default=5000, help="evictions (5000)")
    options = parser.parse_args(argv)
    figures = [
        measure_decode(options.running, options.steps),
        measure_waiting(options.running, options.waiting, options.steps),
        measure_admission(options.prompts),
        measure_eviction(options.nodes, options.evictions),
    ]
    times = dict.fromkeys(("median, µs", "p99, µs", "aim, µs"), ">10.1f")
    table = TextTable({"CPU time of one": "<48"} | times)
    print(table.head)
    for name, _, *seconds in figures:
        print(table.row(name, *(1e6 * each for each in seconds)))
    print(json.dumps([figure._asdict() for figure in figures]))
    return 0
