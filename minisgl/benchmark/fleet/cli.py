"""Simulates a fleet of replicas in virtual time, without a GPU.

Each replica is a real scheduler with a real prefix cache; StepCost predicts the time of its steps.
A router chooses the replica of each request. Replicas can fail, restart one after the other, and be
scaled by the rules of the chart's HorizontalPodAutoscaler. The output has a line for each run:
share and rate of the good requests (see --ttft-ms and --itl-ms), latencies in milliseconds, the
share of cached prompt tokens, and the hours in which replicas held GPUs.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minisgl.benchmark.flag_types import (
    flags,
    nonnegative_float,
    nonnegative_int,
    output_file,
    positive_float,
    positive_int,
)
from minisgl.benchmark.fleet.autoscale import Autoscaler
from minisgl.benchmark.fleet.fleet import Fleet, FleetPlan
from minisgl.benchmark.fleet.report import (
    HEADER,
    Objective,
    Run,
    least_replicas,
    make_run,
    plot,
    replica_lines,
    row,
)
from minisgl.benchmark.fleet.routers import ROUTERS, make_router
from minisgl.benchmark.load import add_load_flags, arrivals, load_of
from minisgl.benchmark.trace import Load
from minisgl.benchmark.virtual_engine import EngineSettings, add_engine_flags, engine_settings
from minisgl.core import ConfigError

# Measured with Qwen3-8B on one H200 (bench/notebook/2026-11-23-fleet.md).
_MIXED_FACTOR = 1.035  # mixed steps take 3 to 4 % more than predicted
_FRONT_END_MS = 3.6  # first token after 14.6 ms at the client, and 11.0 ms in the engine
_START_S = 11.3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="minisgl bench fleet", description=__doc__)
    rules = Autoscaler()
    add = flags(parser, "fleet")
    add("--replicas", positive_int, 1, "replicas at time 0")
    add("--retries", nonnegative_int, 0, "times that a client sends a lost request again")
    add("--front-end-ms", nonnegative_float, _FRONT_END_MS, "from router to scheduler")
    add = flags(parser, "objective of a good request")
    add("--ttft-ms", positive_float, 5000.0, "limit of the time to first token")
    add("--itl-ms", positive_float, 50.0, "limit of the mean inter-token latency")
    add("--share", positive_float, 0.99, "share of good requests to reach")
    add = flags(parser, "failures and rollouts")
    add("--start-s", nonnegative_float, _START_S, "time of a start, until ready")
    add("--drain-s", nonnegative_float, 60.0, "longest drain before a restart")
    add("--settle-s", nonnegative_float, 5.0, "pause of a rollout after a replica is ready")
    add = flags(parser, "autoscaling, with the rules of the chart")
    add("--target-running", positive_float, rules.target_running, "running per replica")
    add("--target-waiting", positive_float, rules.target_waiting, "waiting per replica")
    add("--up-window-s", nonnegative_float, rules.up_window_s, "window for adding")
    add("--down-window-s", nonnegative_float, rules.down_window_s, "window for removing")
    add = flags(parser)
    times: dict[str, Any] = {"nargs": "+", "metavar": "SECONDS"}
    add("--fail-at", nonnegative_float, [], "times at which a replica dies", **times)
    add("--rollout-at", nonnegative_float, [], "times at which a rolling restart begins", **times)
    add(
        "--autoscale",
        positive_int,
        None,
        "use between MIN and MAX replicas; --replicas is the number at time 0",
        nargs=2,
        metavar=("MIN", "MAX"),
    )
    add(
        "--find-replicas",
        positive_int,
        None,
        "search for the least number of replicas, up to MOST, that meets the objective",
        metavar="MOST",
    )
    parser.add_argument(
        "--router",
        choices=ROUTERS,
        nargs="+",
        default=["approximate"],
        help="one run for each: replicas in turn, fewest open requests, endpoint picker with its "
        "approximate index, endpoint picker with cache events (approximate)",
    )
    add("--json", output_file, None, "write settings and runs to this file")
    add("--plot", output_file, None, "write latencies and replicas, as an SVG")
    add_engine_flags(parser, _MIXED_FACTOR)
    add_load_flags(parser)
    return parser


def _load(options: argparse.Namespace) -> tuple[Load, list[float]]:
    """Return the load and its arrival times.

    --rate replaces the arrival times and the turns of a trace.
    """
    load = load_of(options)
    times_s = load.arrivals_s
    if options.trace is not None and options.rate is not None:
        is_poisson = options.arrival == "poisson"
        times_s = arrivals(len(load.prompts), options.rate, is_poisson, options.seed)
        load = load._replace(turns=None)
    if times_s is None or options.beside:
        raise ConfigError("a fleet needs --rate or --trace, and takes no --beside")
    return load, times_s


def _plan(options: argparse.Namespace, replicas: int) -> FleetPlan:
    """Return a plan with `replicas` replicas at time 0. Raises ConfigError."""
    rules = None
    if options.autoscale is not None:
        least, most = options.autoscale
        if not least <= replicas <= most or options.find_replicas or options.rollout_at:
            raise ConfigError(
                "--autoscale needs MIN <= --replicas <= MAX, and takes neither --find-replicas nor "
                "--rollout-at"
            )
        targets = options.target_running, options.target_waiting
        rules = Autoscaler(least, most, *targets, options.up_window_s, options.down_window_s)
    return FleetPlan(
        replicas,
        options.front_end_ms / 1e3,
        options.start_s,
        options.drain_s,
        options.settle_s,
        tuple(options.fail_at),
        tuple(options.rollout_at),
        options.retries,
        rules,
    )


def _print_runs(
    options: argparse.Namespace, load: Load, times_s: list[float], settings: EngineSettings
) -> tuple[list[Run], bool]:
    """Run and print. Returns the runs, and whether each router meets the objective."""
    objective = Objective(options.ttft_ms / 1e3, options.itl_ms / 1e3, options.share)
    page_size = settings.engine().page_size
    runs: list[Run] = []

    def meets(replicas: int) -> bool:
        plan = _plan(options, replicas)
        router = make_router(name, page_size, options.num_pages, options.seed)
        result = Fleet(load, times_s, settings, plan).run(router)
        runs.append(make_run(name, replicas, result, objective))
        print(row(runs[-1]), *replica_lines(runs[-1]), sep="\n", flush=True)
        return bool(runs[-1].summary["meets_objective"])

    is_met = True
    print(HEADER)
    for name in options.router:
        if options.find_replicas is None:
            is_met &= meets(options.replicas)
            continue
        least = least_replicas(meets, options.find_replicas)
        is_met &= least is not None
        print(f"  {name}: {least or 'more than ' + str(options.find_replicas)} replicas")
    return runs, is_met


def main(argv: Sequence[str]) -> int:
    """Print a table. Returns 1 when a run, or the search of a router, misses the objective."""
    options = _parser().parse_args(argv)
    _plan(options, options.replicas)  # refuses wrong flags before the load is made
    settings = engine_settings(options)
    load, times_s = _load(options)
    runs, is_met = _print_runs(options, load, times_s, settings)
    if options.json is not None:
        kept = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
        kept |= {name: str(value) for name, value in kept.items() if value == math.inf}
        found = {"settings": kept, "runs": [run.summary for run in runs]}
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if options.plot is not None:
        options.plot.write_text(plot(runs), encoding="utf-8")
    return 0 if is_met else 1
