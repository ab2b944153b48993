"""Dispatch of `minisgl bench NAME ...`."""

import argparse
import sys
from collections.abc import Sequence

_HELP = {
    "floor": "the least time that a workload can take, from bytes and operations",
    "kernels": "each GPU kernel beside the time its bytes take",
    "offline": "throughput of the offline engine, as a fraction of the floor",
    "online": "latencies and throughput of a server under load over HTTP",
    "reduce": "sums over GPUs as the engine asks for them, and by NCCL",
    "scheduler": "CPU time of the scheduler alone, with a model that does no work",
    "server": "stream events per second and core of the API process, with a stub engine",
    "simulate": "the scheduler and its prefix cache under a load, in virtual time",
    "step": "one decode step on the GPU, kernel by kernel",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark named first in `argv`; the rest is its own. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="minisgl bench",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"  {name:<12} {text}" for name, text in _HELP.items()),
    )
    parser.add_argument("name", choices=sorted(_HELP), help="which benchmark")
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = parser.parse_args(arguments[:1]).name
    if name == "scheduler":
        from minisgl.benchmark.scheduler import main as run
    elif name == "kernels":
        from minisgl.benchmark.kernels import main as run
    elif name == "offline":
        from minisgl.benchmark.offline import main as run
    elif name == "online":
        from minisgl.benchmark.online import main as run
    elif name == "reduce":
        from minisgl.benchmark.reduce import main as run
    elif name == "server":
        from minisgl.benchmark.server import main as run
    elif name == "simulate":
        from minisgl.benchmark.simulate import main as run
    elif name == "step":
        from minisgl.benchmark.step_profile import main as run
    else:
        from minisgl.benchmark.floor import main as run
    return run(arguments[1:])
