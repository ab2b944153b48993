"""A replacement of kernel.find_drafts that knows the outputs of all requests."""

from collections.abc import Callable, Sequence

import torch

from minisgl.distributed.comm import Communicator
from tests.unit.scheduler.drafts import DRAFTERS
from tests.unit.structured.grammars import Outcome, Run, Task, run_tasks


def drafts_of(sequences: Sequence[list[int]], drafter: str) -> Callable[..., None]:
    """Return the replacement. sequences: prompt and output of each request. drafter: in DRAFTERS.

    A wrong draft is the id after the right one.
    """

    def find(
        token_pool: torch.Tensor,
        rows: torch.Tensor,
        cached: torch.Tensor,
        tails: torch.Tensor,
        lengths: torch.Tensor,
        width: int,
        found: torch.Tensor,
        predicted: torch.Tensor,
        made: torch.Tensor | None = None,
    ) -> None:
        for index, row in enumerate(rows.tolist()):
            end, count = int(cached[row]) + 1, int(lengths[index])
            tokens = token_pool[row, :end].tolist()
            follows = next((s[end:] for s in sequences if s[:end] == tokens), [])
            found[index] = count
            for nth in range(count):
                right = follows[nth] if nth < len(follows) else 0
                agrees = DRAFTERS[drafter](row, end + nth)
                token_pool[row, end + nth] = right if agrees else (right + 1) % 100

    return find


def run_with_right_drafts(
    comm: Communicator,
    folder: str,
    path: str,
    run: Run,
    tasks: list[Task],
    sequences: list[list[int]],
) -> Outcome:
    """Run the tasks on this rank, with right drafts if the run has drafts.

    sequences: prompt and output of each request. Ranks get this function, not its drafter.
    """
    find = drafts_of(sequences, "right") if run.drafts else None
    return run_tasks(comm, folder, path, run, tasks, find)
