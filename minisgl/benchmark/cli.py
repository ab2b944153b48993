"""Runs the benchmark of `minisgl bench NAME ...`."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from minisgl.core import ConfigError
from minisgl.utils import near_names, setup_logging

HELP = {
    "fleet": "replicas behind a router under a load, in simulated time: how many GPUs to buy",
    "floor": "the shortest possible time of a workload, from bytes and operations",
    "offline": "throughput of the offline engine, as a fraction of the floor",
    "online": "latencies and throughput of a server under load over HTTP",
}
_MODULES = {"fleet": "fleet.cli"}  # the module whose name is not that of its benchmark
# Benchmarks for developers. They are in the repository, and not in the installed package.
_MOVED = (
    "attack",
    "divergence",
    "drafts",
    "kernels",
    "reduce",
    "scheduler",
    "server",
    "simulate",
    "step",
    "structured",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark and return its exit code.

    argv: the name of the benchmark, then its flags; None for the process's command line. Raises
    ConfigError for an unknown name, and for one that has moved to the folder bench.
    """
    parser = argparse.ArgumentParser(
        prog="minisgl bench",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"  {name:<12} {text}" for name, text in HELP.items()),
    )
    parser.add_argument("name", metavar="NAME", help="the benchmark to run")
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = parser.parse_args(arguments[:1]).name
    if name in _MOVED:
        raise ConfigError(
            f"`minisgl bench {name}` has moved: run `python -m bench {name}` in a checkout of the "
            "repository"
        )
    if name not in HELP:
        known = ", ".join(sorted(HELP))
        raise ConfigError(f"there is no benchmark {name!r}; known: {known}{near_names(name, HELP)}")
    setup_logging("bench", "info")  # without a terminal, the progress is lines of the log
    # Import only this benchmark, because some of them load torch.
    module = importlib.import_module(f"minisgl.benchmark.{_MODULES.get(name, name)}")
    code: int = module.main(arguments[1:])
    return code
