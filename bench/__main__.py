"""Runs `python -m bench NAME [FLAGS]`."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from minisgl.core import ConfigError
from minisgl.utils import near_names, setup_logging, supervise

NAMES = {
    "attack": "time of /livez, memory, and first tokens of other clients while clients attack",
    "divergence": "next-token distributions of a quantised model against those of the model itself",
    "drafts": "speed of code edits with and without drafts; the edits are real, the weights random",
    "kernels": "time of each GPU kernel, and the time to move its bytes",
    "plot": "draws the pictures of docs/benchmarks.md from bench/results",
    "reduce": "all-reduce over GPUs, by the engine and by NCCL",
    "scheduler": "CPU time of the scheduler, with an engine that does no work",
    "server": "stream events per second and per core of the API process, without an engine",
    "simulate": "scheduler and prefix cache under a load, in simulated time",
    "step": "one decode step on the GPU, with the time of each kernel",
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
    parser.add_argument("name", metavar="NAME", help="the benchmark to run")
    name = parser.parse_args(arguments[:1]).name
    if name not in NAMES:
        known = ", ".join(NAMES)
        raise ConfigError(
            f"there is no benchmark {name!r}; known: {known}{near_names(name, NAMES)}"
        )
    setup_logging("bench", "info")  # without a terminal, the progress is lines of the log
    # Import only this benchmark, because some of them load torch.
    code: int = importlib.import_module(f"bench.{name}").main(arguments[1:])
    return code


if __name__ == "__main__":
    sys.exit(main())
