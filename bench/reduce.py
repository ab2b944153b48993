"""Times an all-reduce and the norm after it on the GPUs of one host, by the engine and by NCCL."""

import argparse
import json
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minisgl.benchmark.flag_types import positive_int
from minisgl.distributed.comm import GroupCommunicator, TPInfo, connect

_CALLS = 20  # captured in one CUDA graph
_REPLAYS = 30


def time_us(run: Callable[[], object]) -> float:
    """Return the median time of one call in microseconds, from a CUDA graph of _CALLS calls."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(_CALLS):
            run()
        graph.capture_end()
        times: list[float] = []
        for _ in range(_REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / _CALLS)
    return statistics.median(times)


def measure(comm: GroupCommunicator, rows: int, width: int) -> tuple[float, float, float]:
    """Return microseconds for [rows, width] bfloat16: the engine, NCCL and norm, NCCL alone."""

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, device=comm.device).bfloat16()

    x, residual, weight = noise(rows, width), noise(rows, width), noise(width)
    plain = GroupCommunicator(comm.tp, comm.group, comm.device)
    return (
        time_us(lambda: comm.reduce_norm(x, residual, weight, 1e-6)),
        time_us(lambda: plain.reduce_norm(x, residual, weight, 1e-6)),
        time_us(lambda: plain.all_reduce(x)),
    )


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
    for width in widths:
        for count in rows:
            times = measure(comm, count, width)
            results.append({"rows": count, "width": width, "us": times})
            if comm.tp.rank == 0:
                line = "".join(f"{time:>12.1f}" for time in times)
                print(f"{count:>6} x {width:<6} {line}", flush=True)
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
    print(f"{'rows x width':<16}{'engine':>12}{'NCCL + norm':>12}{'NCCL alone':>12}  µs, bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(options.tp, folder, compare, options.width, options.rows)
