"""Run one function on several ranks, each in a process of its own."""

import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from minisgl.distributed.comm import Communicator, TPInfo, connect
from minisgl.utils.process import write_socket_key
from tests.patience import patience

__all__ = ["run_ranks"]

# The imports of the functions that tests give to `run_ranks`. The fork server has them once, so
# each rank starts without seconds of imports.
_IMPORTS = ["pytest", "tests.parity.rank_cases", "tests.unit.structured.grammars"]


def _rank_main(
    function: Callable[..., Any],
    tp: TPInfo,
    file: str,
    device: str,
    args: tuple[Any, ...],
    out: Any,
) -> None:
    torch.set_num_threads(1)
    comm: Communicator | None = None
    try:
        where = torch.device(device, tp.rank) if device == "cuda" else torch.device(device)
        comm = connect(tp, where, file, timeout_s=60)
        out.put((tp.rank, None, function(comm, *args)))
    except Exception:  # noqa: BLE001 (handed to the test)
        out.put((tp.rank, traceback.format_exc(), None))
    finally:
        if comm is not None:
            comm.close()


def run_ranks(
    size: int, folder: Path, function: Callable[..., Any], *args: Any, device: str = "cpu"
) -> list[Any]:
    """Call function(comm, *args) on each rank, and return the results in rank order.

    Results must not hold tensors, because their memory ends with the rank's process.
    """
    # A process that has CUDA's libraries loaded may not fork.
    context = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
    context.set_forkserver_preload(_IMPORTS)
    out = context.Queue()
    write_socket_key(folder)  # For functions that use queues between the ranks.
    file = str(folder / "rendezvous")
    processes = [
        context.Process(
            target=_rank_main, args=(function, TPInfo(rank, size), file, device, args, out)
        )
        for rank in range(size)
    ]
    results: dict[int, Any] = {}
    errors: list[str] = []
    try:
        for process in processes:
            process.start()
        for _ in processes:
            rank, error, value = out.get(timeout=patience(240))
            results[rank] = value
            if error is not None:
                errors.append(f"rank {rank}: {error}")
        assert not errors, "\n".join(errors)
        for process in processes:
            process.join(patience(60))
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
    return [results[rank] for rank in range(size)]
