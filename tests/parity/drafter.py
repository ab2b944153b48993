"""A replacement of kernel.find_drafts that knows the outputs of all requests."""

from collections.abc import Callable, Sequence

import torch

from tests.unit.scheduler.drafts import DRAFTERS


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
