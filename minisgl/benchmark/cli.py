"""Dispatch of `minisgl bench NAME ...`."""

import argparse
import sys
from collections.abc import Sequence

_HELP = {
    "attack": "time of /livez and memory of the server while clients without a key attack it",
    "divergence": "next-token distributions of a quantised model against those of the model itself",
    "drafts": "code edits with and without drafts, by real edits and random weights",
    "fleet": "replicas behind a router under a load, in simulated time: how many GPUs to buy",
    "floor": "the shortest possible time of a workload, from bytes and operations",
    "kernels": "time of each GPU kernel, and the time to move its bytes",
    "offline": "throughput of the offline engine, as a fraction of the floor",
    "online": "latencies and throughput of a server under load over HTTP",
    "reduce": "all-reduce over GPUs, by the engine and by NCCL",
    "scheduler": "CPU time of the scheduler, with an engine that does no work",
    "server": "stream events per second and core of the API process, without an engine",
    "simulate": "scheduler and prefix cache under a load, in simulated time",
    "structured": "outputs that follow a JSON schema, beside free ones",
    "step": "one decode step on the GPU, with the time of each kernel",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark and return its exit code.

    argv: the name of the benchmark, then its flags; None for the process's command line.
    """
    parser = argparse.ArgumentParser(
        prog="minisgl bench",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"  {name:<12} {text}" for name, text in _HELP.items()),
    )
    parser.add_argument("name", choices=sorted(_HELP), help="the benchmark to run")
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = parser.parse_args(arguments[:1]).name
    if name == "attack":
        from minisgl.benchmark.attack import main as run
    elif name == "divergence":
        from minisgl.benchmark.divergence import main as run
    elif name == "drafts":
        from minisgl.benchmark.code_edits import main as run
    elif name == "scheduler":
        from minisgl.benchmark.scheduler import main as run
    elif name == "fleet":
        from minisgl.benchmark.fleet.cli import main as run
    elif name == "kernels":
        from minisgl.benchmark.kernels import main as run
    elif name == "offline":
        from minisgl.benchmark.offline import main as run
    elif name == "online":
        from minisgl.benchmark.online import main as run
    elif name == "reduce":
        from minisgl.benchmark.all_reduce import main as run
    elif name == "server":
        from minisgl.benchmark.server import main as run
    elif name == "simulate":
        from minisgl.benchmark.simulate import main as run
    elif name == "structured":
        from minisgl.benchmark.structured import main as run
    elif name == "step":
        from minisgl.benchmark.step_profile import main as run
    else:
        from minisgl.benchmark.floor import main as run
    return run(arguments[1:])
