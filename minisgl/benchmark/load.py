"""The load of a benchmark, from command-line flags: prompts, output lengths and arrival times."""

import argparse
import random
from pathlib import Path

from minisgl.benchmark.flag_types import flags, nonnegative_float, positive_float, positive_int
from minisgl.benchmark.trace import Load, read_trace, replay
from minisgl.benchmark.workload import add_workload_flags, check_workload, workload_from


def arrivals(count: int, rate: float, poisson: bool, seed: int) -> list[float]:
    """Return `count` arrival times in seconds, at `rate` requests per second.

    The gaps are 1 / rate, or exponential with that mean. With rate inf all requests arrive at 0.
    """
    source = random.Random(seed)
    times: list[float] = []
    now_s = 0.0
    for _ in range(count):
        times.append(now_s)
        now_s += source.expovariate(rate) if poisson else 1 / rate
    return times


def load_of(options: argparse.Namespace) -> Load:
    """Return the load that the flags describe. Raises ConfigError."""
    check_workload(options)
    if options.trace is not None:
        return replay(
            read_trace(options.trace, options.requests),
            time_scale=options.time_scale,
            length_scale=options.length_scale,
            max_prompt_tokens=options.max_prompt,
            max_output_tokens=options.max_output,
            largest_id=options.largest_id,
        )
    load = workload_from(options)
    if options.rate is None:
        return load
    is_poisson, count = options.arrival == "poisson", len(load.prompts)
    return load._replace(arrivals_s=arrivals(count, options.rate, is_poisson, options.seed))


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that load_of and background_load read."""
    add = flags(parser, "load")
    add(
        "--concurrency",
        positive_int,
        256,
        "open requests; not used with --rate or --trace",
    )
    add(
        "--rate",
        positive_float,
        None,
        "requests per second, sent even while others are open; inf: all at once",
    )
    add(
        "--arrival",
        str,
        "poisson",
        "gaps between arrivals: exponential or equal",
        choices=("poisson", "uniform"),
    )
    add("--trace", Path, None, "replay the first --requests lines of a file")
    add("--time-scale", nonnegative_float, 1.0, "factor for the trace's arrival times and pauses")
    add("--length-scale", nonnegative_float, 1.0, "factor for the trace's lengths")
    for kind in ("prompt", "output"):
        add(f"--max-{kind}", positive_int, None, f"cut the trace's {kind}s to this many tokens")
    add(
        "--beside",
        int,
        None,
        "run STREAMS background streams of PROMPT and OUTPUT tokens during the load, and report "
        "their inter-token latency",
        nargs=3,
        metavar=("STREAMS", "PROMPT", "OUTPUT"),
    )
    add_workload_flags(parser)
