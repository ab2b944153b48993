"""Runs the benchmark of `minisgl bench NAME ...`."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from minisgl.core import ConfigError
from minisgl.utils import near_names, setup_logging

_HELP = {
    "attack": "time of /livez, memory, and first tokens of other clients while clients attack",
    "divergence": "next-token distributions of a quantised model against those of the model itself",
    "drafts": "speed of code edits with and without drafts; the edits are real, the weights random",
    "fleet": "replicas behind a router under a load, in simulated time: how many GPUs to buy",
    "floor": "the shortest possible time of a workload, from bytes and operations",
    "kernels": "time of each GPU kernel, and the time to move its bytes",
    "offline": "throughput of the offline engine, as a fraction of the floor",
    "online": "latencies and throughput of a server under load over HTTP",
    "reduce": "all-reduce over GPUs, by the engine and by NCCL",
    "scheduler": "CPU time of the scheduler, with an engine that does no work",
    "server": "stream events per second and per core of the API process, without an engine",
    "simulate": "scheduler and prefix cache under a load, in simulated time",
    "structured": "outputs that follow a JSON schema, compared with free outputs",
    "step": "one decode step on the GPU, with the time of each kernel",
}
# The modules whose name is not that of their benchmark.
_MODULES = {
    "drafts": "code_edits",
    "fleet": "fleet.cli",
    "reduce": "all_reduce",
    "step": "step_profile",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark and return its exit code.

    argv: the name of the benchmark, then its flags; None for the process's command line. Raises
    ConfigError for an unknown name.
    """
    parser = argparse.ArgumentParser(
        prog="minisgl bench",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"  {name:<12} {text}" for name, text in _HELP.items()),
    )
    parser.add_argument("name", metavar="NAME", help="the benchmark to run")
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = parser.parse_args(arguments[:1]).name
    if name not in _HELP:
        known = ", ".join(sorted(_HELP))
        raise ConfigError(
            f"there is no benchmark {name!r}; known: {known}{near_names(name, _HELP)}"
        )
    setup_logging("bench", "info")  # without a terminal, the progress is lines of the log
    # Import only this benchmark, because some of them load torch.
    module = importlib.import_module(f"minisgl.benchmark.{_MODULES.get(name, name)}")
    code: int = module.main(arguments[1:])
    return code
