"""Runs the real scheduler and prefix cache under a load in simulated time, without a GPU.

A simulated clock replaces the engine: each step advances the clock by the time that StepCost
predicts. A server logs the step cost that it has measured ("step cost"). The
output has the latencies and the share of cached prompt tokens: with the prefix cache and, for loads
without turns, with an LRU cache and with an ideal cache.

With --flood, one client sends many requests at once. The load follows 5 s later, from a second
client. The output then also has the times to first token of the load without the flood, and the
duration of the longest step.

A trace of agents has turns: a request is sent after the tools and the user have answered the one
before it. --beside, --flood and --low replay such a trace by its arrival times. --window-s leaves
the start and the end of a run out of its figures. --end-sessions shows the worth of the ends of
sessions, which the trace names.

With --images, each prompt of the load begins with a new image. With --beside, the output then has
the ratio of the 99th percentiles of the gaps of the streams, with the load and without it.

With --low, requests of a later priority arrive during the load. The output then also has the times
to first token of the load alone, and the ratio of the two 99th percentiles.
"""

import argparse
import heapq
import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from bench.image_load import encoder_limits, with_images
from minisgl.benchmark.background_streams import background_load, summarise_streams
from minisgl.benchmark.client import Answer
from minisgl.benchmark.flag_types import nonnegative_float, positive_float
from minisgl.benchmark.latency import by_turn, describe, error_lines, latencies, summarise, table
from minisgl.benchmark.load import add_load_flags, arrivals, load_of
from minisgl.benchmark.outbox import record_step
from minisgl.benchmark.trace import Load, Turns, hit_ratios
from minisgl.benchmark.virtual_engine import VirtualEngine, add_engine_flags, engine_settings
from minisgl.benchmark.workload import make_workload
from minisgl.core import ConfigError, SamplingParams, SchedulerConfig, StepCost
from minisgl.message.messages import AddReq, EndSession, PromptImage, StepOutput, ToScheduler
from minisgl.scheduler import Scheduler
from minisgl.scheduler.inbox import WaitS
from minisgl.utils.startup import Progress

_FLOOD_LEAD_S = 5.0  # the load starts this long after the flood
ImagesByReq = Mapping[int, tuple[PromptImage, ...]]
_NO_IMAGES: ImagesByReq = MappingProxyType({})


class _Arrivals:
    """Implements Inbox with the requests of a load. A wait advances the simulated time."""

    def __init__(
        self,
        load: Load,
        engine: VirtualEngine,
        times_s: list[float],
        ends_sessions: bool,
        images: ImagesByReq,
    ) -> None:
        """times_s: arrival times of the first requests of `load`. ends_sessions: tell the scheduler
        when the last request of a session has ended."""
        self._load, self._images = load, images
        self._engine = engine
        self._turns = Turns(load, times_s)
        self.due = self._turns.first
        heapq.heapify(self.due)
        self.sent_s: dict[int, float] = {}
        self._last = load.last if ends_sessions else None
        self._ends: list[ToScheduler] = []

    def ended(self, index: int) -> None:
        """Request `index` has ended. Those that waited for it become due.

        Without arrival times, the next request of the load arrives now, if there is one.
        """
        for follower in self._turns.ended(index, self._engine.now_s):
            heapq.heappush(self.due, follower)
        if self._last is not None and self._load.sessions and self._last[index]:
            self._ends.append(EndSession(session=self._load.sessions[index]))
        following = len(self.sent_s) + len(self.due)
        if self._load.arrivals_s is None and following < len(self._load.prompts):
            heapq.heappush(self.due, (self._engine.now_s, following))

    def receive(
        self, wait_s: WaitS, plan_hash: int | None = None, own: Sequence[ToScheduler] = ()
    ) -> list[ToScheduler]:
        engine, longest_s = self._engine, wait_s()
        messages, self._ends = self._ends, []
        end_s = math.inf if longest_s is None else engine.now_s + longest_s
        engine.now_s = max(engine.now_s, min([end_s, *(due_s for due_s, _ in self.due[:1])]))
        while self.due and self.due[0][0] <= engine.now_s:
            self._send(messages)
        return [*messages, *own]

    def _send(self, messages: list[ToScheduler]) -> None:
        due_s, index = heapq.heappop(self.due)
        self.sent_s[index] = due_s
        max_tokens = self._load.max_tokens[index]
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0)
        ids = self._load.prompts[index].astype("<i4").tobytes()
        client = self._load.clients[index] if self._load.clients else ""
        priority = self._load.priorities[index] if self._load.priorities else 0
        stable = self._load.stable[index] if self._load.stable else 0
        messages.append(
            AddReq(
                uid=index,
                token_ids=ids,
                sampling=sampling,
                client=client,
                call=index,
                priority=priority,
                prefixes=(stable, 0),
                session=self._load.sessions[index] if self._load.sessions else "",
                images=self._images.get(index, ()),
            )
        )


def simulate(
    load: Load,
    engine: VirtualEngine,
    cost: StepCost,
    config: SchedulerConfig,
    concurrency: int,
    end_s: float = math.inf,
    ends_sessions: bool = False,
    images: ImagesByReq = _NO_IMAGES,
) -> list[Answer]:
    """Run `load`, at most until end_s, and return its answers in order.

    concurrency: open requests at a time, for a load without arrival times. ends_sessions: as for
    _Arrivals. images: of the requests with these indices.
    """
    answers = [Answer(0.0, prompt_tokens=len(prompt)) for prompt in load.prompts]
    times_s = load.arrivals_s or [0.0] * min(concurrency, len(answers))
    arrivals = _Arrivals(load, engine, times_s, ends_sessions, images)
    outbox = deque[StepOutput]()
    scheduler = Scheduler(
        engine,
        config,
        vocab_size=2**31 - 1,
        eos_token_ids=(),
        inbox=arrivals,
        send=outbox.append,
        clock=lambda: engine.now_s,
        cost=cost,
    )
    bar = Progress(total=len(answers), unit="req")
    while (arrivals.due or not scheduler.idle) and engine.now_s < end_s:
        scheduler.iterate()
        while outbox:
            output = outbox.popleft()
            record_step(answers, output, engine.now_s)
            for finished in output.finished:
                arrivals.ended(finished.uid)
                bar.update()
    bar.close()
    for uid, sent_s in arrivals.sent_s.items():
        answers[uid].sent_s = sent_s
    return answers


def add_flood(load: Load, options: argparse.Namespace) -> Load:
    """Return `load` with later arrivals, and then the requests of a client that sends all at once.

    Raises ConfigError for a load without arrival times.
    """
    count, prompt, output = options.flood
    if load.arrivals_s is None or min(count, prompt, output) < 1:
        raise ConfigError("--flood takes three positive numbers, and needs --rate or --trace")
    seed = options.seed + 2_000_003  # not the seed of the load, so that no prefix is shared
    flood = make_workload(count, (prompt, prompt), (output, output), 0, seed, options.largest_id)
    return Load(
        load.prompts + flood.prompts,
        load.max_tokens + flood.max_tokens,
        [_FLOOD_LEAD_S + at_s for at_s in load.arrivals_s] + [0.0] * count,
        ["load"] * len(load.prompts) + ["flood"] * count,
    )


def add_low(load: Load, options: argparse.Namespace) -> Load:
    """Return `load`, and then requests of priority 1 that arrive until its last arrival.

    Raises ConfigError for a load without arrival times.
    """
    rate, prompt, output = options.low[0], int(options.low[1]), int(options.low[2])
    if load.arrivals_s is None or rate <= 0 or min(prompt, output) < 1:
        raise ConfigError("--low takes three positive numbers, and needs --rate or --trace")
    count = max(int(rate * load.arrivals_s[-1]), 1)
    seed = options.seed + 3_000_017  # not the seed of the load, so that no prefix is shared
    low = make_workload(count, (prompt, prompt), (output, output), 0, seed, options.largest_id)
    return Load(
        load.prompts + low.prompts,
        load.max_tokens + low.max_tokens,
        load.arrivals_s + arrivals(count, rate, poisson=True, seed=seed),
        None,
        [0] * len(load.prompts) + [1] * count,
    )


def summarise_window(
    load: Load, answers: Sequence[Answer], begin_s: float, end_s: float
) -> dict[str, Any]:
    """Summarise the answers that end between these times, as `summarise`."""
    inside = [
        answer
        for answer, most in zip(answers, load.max_tokens, strict=True)
        if (answer.output_tokens == most or answer.error is not None)
        and begin_s <= (answer.outputs_s or [answer.sent_s])[-1] < end_s
    ]
    summary, seconds = summarise(inside), end_s - begin_s
    rates = {"requests_per_s": "requests", "output_tokens_per_s": "output_tokens"}
    return summary | {rate: summary[count] / seconds for rate, count in rates.items()}


def main(argv: Sequence[str]) -> int:
    """Print a table and one line of JSON. Returns 1 when a request failed."""
    parser = argparse.ArgumentParser(prog="python -m bench simulate", description=__doc__)
    add_engine_flags(parser)
    parser.add_argument(
        "--flood",
        type=int,
        nargs=3,
        metavar=("REQUESTS", "PROMPT", "OUTPUT"),
        help="let another client send REQUESTS of PROMPT and OUTPUT tokens 5 s before the load",
    )
    parser.add_argument(
        "--low",
        type=float,
        nargs=3,
        metavar=("RATE", "PROMPT", "OUTPUT"),
        help="let RATE requests per second of PROMPT and OUTPUT tokens and of a later priority "
        "arrive during the load",
    )
    parser.add_argument(
        "--window-s",
        type=nonnegative_float,
        nargs=2,
        default=(0.0, math.inf),
        metavar=("FROM", "TO"),
        help="report the answers that end between these times, and end the run at TO",
    )
    parser.add_argument(
        "--end-sessions",
        action="store_true",
        help="end each session of a trace after its last answer, so that its prefixes go first",
    )
    parser.add_argument(
        "--images",
        type=positive_float,
        nargs=2,
        metavar=("SIDE", "MS"),
        help="put a new image of SIDE x SIDE pixels, which the encoder takes MS to encode, before "
        "each prompt of the load",
    )
    add_load_flags(parser)
    options = parser.parse_args(argv)
    settings, load = engine_settings(options), load_of(options)
    background, cost, config = background_load(options), settings.cost, settings.config
    images: ImagesByReq = _NO_IMAGES
    if options.images:
        side, encoding_ms = options.images
        limits_of_images = encoder_limits(encoding_ms / 1000, cost)
        settings = settings._replace(images=limits_of_images)
        load, found = with_images(load, int(side), limits_of_images)
        images = dict(enumerate(found, len(background.prompts)))
    engine, both = settings.engine(), load
    if background.prompts:
        if load.arrivals_s is None:
            raise ConfigError("--beside is simulated only together with --rate or --trace")
        alone = simulate(background, settings.engine(), cost, config, 1)
        if alone[0].error:
            raise ConfigError(f"--beside: {alone[0].error}")
        begin_s = max(answer.outputs_s[0] for answer in alone)
        both = Load(
            background.prompts + load.prompts,
            background.max_tokens + load.max_tokens,
            [0.0] * len(alone) + [begin_s + at_s for at_s in load.arrivals_s],
        )
    num_streams, num_reqs = len(background.prompts), len(both.prompts)
    if options.flood and options.low:
        raise ConfigError("--flood and --low are alternatives; give one of them")
    if options.flood or options.low:
        idle = simulate(both, settings.engine(), cost, config, options.concurrency, images=images)
        both = add_flood(both, options) if options.flood else add_low(both, options)
    begin_s, end_s = options.window_s
    if not begin_s < end_s or ((begin_s, end_s) != (0.0, math.inf) and options.beside):
        raise ConfigError("--window-s needs FROM < TO, and takes no --beside")
    if options.end_sessions and both.last is None:
        raise ConfigError(
            "--end-sessions needs a --trace with sessions, and takes no --beside, --flood and --low"
        )
    limits = options.concurrency, end_s, options.end_sessions
    answers = simulate(both, engine, cost, config, *limits, images)[:num_reqs]
    streams, answers = answers[:num_streams], answers[num_streams:]
    summary: dict[str, Any] = summarise(answers)
    if load.turns is not None:
        summary["ttft_s_by_turn"] = by_turn(answers, [turn.number for turn in load.turns])
    if end_s < math.inf:
        summary = summarise_window(load, answers, begin_s, end_s)
    if streams:
        summary["beside"] = summarise_streams(background, streams, answers)
        summary["failed"] += summary["beside"]["failed"]
        without = summarise_streams(background, alone, answers)["itl_s"]["p99"]
        summary["itl_p99_ratio"] = summary["beside"]["itl_s"]["p99"] / without
    print(table(summary), *error_lines([*streams, *answers]), sep="\n")
    if streams:
        ratio = summary["itl_p99_ratio"]
        print(f"streams without the load: ITL p99 {without * 1e3:.2f} ms, ratio {ratio:.3f}")
    if options.low:
        alone_s, beside_s = latencies(idle).ttft_s, latencies(answers).ttft_s
        summary["idle_ttft_s"] = describe(alone_s)
        summary["ttft_p99_ratio"] = np.percentile(beside_s, 99) / np.percentile(alone_s, 99)
        print(
            f"alone: TTFT p99 {np.percentile(alone_s, 99) * 1e3:.2f} ms, "
            f"ratio {summary['ttft_p99_ratio']:.3f}"
        )
    if options.flood:
        summary["idle_ttft_s"] = describe(latencies(idle[num_streams:]).ttft_s)
        summary["longest_step_s"] = engine.longest_s
        print(
            f"without the flood: TTFT {summary['idle_ttft_s']['mean'] * 1e3:.2f} ms; "
            f"longest step {summary['longest_step_s'] * 1e3:.2f} ms"
        )
    if load.turns is None:  # the order of turns is that of one run
        summary |= hit_ratios(load.prompts, engine.num_pages, engine.page_size)
    print(json.dumps(summary | {"busy_s": engine.busy_s}))
    return 1 if summary["failed"] else 0
