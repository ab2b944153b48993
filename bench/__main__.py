"""Runs `python -m bench [--repeat N] [--against CHECKOUT] [--save] NAME [FLAGS]`."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from minisgl.benchmark.flag_types import positive_int
from minisgl.core import ConfigError
from minisgl.utils import near_names, setup_logging, supervise

NAMES = {
    "attack": "time of /livez, memory, and first tokens of other clients while clients attack",
    "campaign": "the rows of a table of docs/benchmarks.md, as records in bench/results",
    "collect": "adds results of other machines to bench/results, and prints them as a table",
    "divergence": "next-token distributions of a quantised model against those of the model itself",
    "drafts": "speed of code edits with and without drafts; the edits are real, the weights random",
    "gaps": "the longest steps of streams beside prompts, from the samples of a run",
    "host_copies": "copies of KV pages between a GPU and host memory",
    "host_hits": "first tokens of prefixes in host memory, and streams and steps beside copies",
    "images": "first tokens and text streams with images, and the time of the image encoder",
    "kernels": "time of each GPU kernel, and the time to move its bytes",
    "plot": "draws the pictures of docs/benchmarks.md from bench/results",
    "reduce": "all-reduce over GPUs, by the engine and by NCCL",
    "scheduler": "CPU time of the scheduler, with an engine that does no work",
    "server": "stream events per second and per core of the API process, without an engine",
    "simulate": "scheduler and prefix cache under a load, in simulated time",
    "step": "one decode step on the GPU, with the time of each kernel",
    "trace": "writes a trace of coding agents, for the benchmarks that replay one",
    "structured": "outputs that follow a JSON schema, compared with free outputs",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark and return its exit code. A ConfigError prints one line to stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except ConfigError as error:
        sys.stderr.write(f"bench: error: {error}\n")
        return supervise.CONFIG_EXIT


def _run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"  {name:<12} {text}" for name, text in NAMES.items()),
    )
    parser.add_argument("--repeat", type=positive_int, help="run it N times, and show the medians")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="CHECKOUT",
        help="run it in turns with the same benchmark of another checkout",
    )
    parser.add_argument(
        "--save", action="store_true", help="write the medians to bench/results/NAME.json"
    )
    parser.add_argument("name", metavar="NAME", help="the benchmark to run")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of the benchmark")
    options = parser.parse_args(arguments)
    name = options.name
    if name not in NAMES:
        known = ", ".join(NAMES)
        raise ConfigError(
            f"there is no benchmark {name!r}; known: {known}{near_names(name, NAMES)}"
        )
    if options.repeat or options.against or options.save:
        return _repeat([name, *options.flags], options)
    setup_logging("bench", "info")  # without a terminal, the progress is lines of the log
    # Import only this benchmark, because some of them load torch.
    code: int = importlib.import_module(f"bench.{name}").main(options.flags)
    return code


def _repeat(arguments: Sequence[str], options: argparse.Namespace) -> int:
    """Run the benchmark in turns, print the medians, and save them if the flags say so."""
    from bench import runner  # loads torch

    if options.against is not None and not (options.against / "bench").is_dir():
        raise ConfigError(f"{options.against} is not a checkout with the folder bench")
    turns = runner.run_in_turns(arguments, options.repeat or 1, options.against)
    print(*runner.table(turns), sep="\n")
    if options.save:
        print(f"saved in {runner.save(arguments, turns.ours)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
