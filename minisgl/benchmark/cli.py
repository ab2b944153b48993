"""Dispatch of `minisgl bench NAME ...`."""

import argparse
import sys
from collections.abc import Sequence

__all__ = ["main"]

_HELP = {
    "kernels": "each GPU kernel beside the time its bytes take",
    "scheduler": "CPU time of the scheduler alone, with a model that does no work",
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
    else:
        from minisgl.benchmark.kernels import main as run
    return run(arguments[1:])
