"""Times an all-reduce and the norm after it on the GPUs of one host, by the engine and by NCCL."""

import argparse
import json
import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.timer import graph_seconds
from minisgl.benchmark.flag_types import positive_int
from minisgl.benchmark.text_table import TextTable
from minisgl.distributed.comm import GroupCommunicator, TPInfo, connect


def measure(comm: GroupCommunicator, rows: int, width: int) -> list[float]:
    """Return microseconds for [rows, width] bfloat16: the engine, NCCL and norm, NCCL alone."""

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, device=comm.device).bfloat16()

    x, residual, weight = noise(rows, width), noise(rows, width), noise(width)
    plain = GroupCommunicator(comm.tp, comm.group, comm.device)
    calls: tuple[Callable[[], object], ...] = (
        lambda: comm.reduce_norm(x, residual, weight, 1e-6),
        lambda: plain.reduce_norm(x, residual, weight, 1e-6),
        lambda: plain.all_reduce(x),
    )
    return [1e6 * graph_seconds([call]) for call in calls]


def run_ranks(tp: int, folder: str, function: Callable[..., None], *args: Any) -> int:
    """Run function(comm, *args) in one process for each GPU.

    folder: holds the rendezvous file of the processes. Returns the largest exit code.
    """
    spawn = multiprocessing.get_context("spawn")
    ranks = [
        spawn.Process(target=_rank, args=(TPInfo(rank, tp), folder, function, args))
        for rank in range(tp)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


def _rank(tp: TPInfo, folder: str, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    comm = connect(tp, torch.device("cuda", tp.rank), str(Path(folder) / "rendezvous"))
    function(comm, *args)
    comm.close()


def compare(comm: GroupCommunicator, widths: Sequence[int], rows: Sequence[int]) -> None:
    """Measure all sizes on one rank. Rank 0 prints the table."""
    results = []
    columns = dict.fromkeys(("engine, µs", "NCCL + norm", "NCCL alone"), ">11.1f")
    table = TextTable({"bfloat16": "<14"} | columns)
    if comm.tp.rank == 0:
        print(table.head)
    for width in widths:
        for count in rows:
            times = measure(comm, count, width)
            results.append({"rows": count, "width": width, "us": times})
            if comm.tp.rank == 0:
                print(table.row(f"{count} x {width}", *times), flush=True)
    if comm.tp.rank == 0:
        print(json.dumps({"tp": comm.tp.size, "times": results}))


def main(argv: Sequence[str]) -> int:
    """Print a table in microseconds and one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench reduce", description=__doc__)
    parser.add_argument("--tp", type=positive_int, default=2, help="number of GPUs (2)")
    parser.add_argument(
        "--width", type=positive_int, nargs="+", default=[5120], help="hidden sizes (5120)"
    )
    parser.add_argument(
        "--rows",
        type=positive_int,
        nargs="+",
        default=[1, 8, 64, 256, 1024, 2048, 8192],
        help="numbers of tokens",
    )
    options = parser.parse_args(argv)
    if torch.cuda.device_count() < options.tp:
        parser.error(f"this benchmark needs {options.tp} CUDA devices")
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(options.tp, folder, compare, options.width, options.rows)
