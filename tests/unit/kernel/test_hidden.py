"""The hidden states before the tokens of a step, compared with a loop over whole requests."""

import numpy as np
import torch

from minisgl.kernel.hidden import shift_hidden
from minisgl.kernel.step import StepViews

DEPTH, SIZE = 8, 3


def test_each_token_gets_the_state_before_it_from_its_step_or_an_earlier_one() -> None:
    """Row 1 begins with a chunk longer than the ring. Rejected tokens of row 0 come again."""
    rng = np.random.default_rng(0)
    ring = torch.full((3, DEPTH, SIZE), torch.nan)
    states: dict[int, dict[int, torch.Tensor]] = {0: {}, 1: {}}
    steps = [
        [(0, 0, 3), (1, 0, 11)],
        [(0, 3, 4), (1, 11, 1)],
        [(0, 5, 2), (1, 12, 2)],
        [(1, 13, 1)],
    ]
    for step in steps:
        rows, start, lengths = (torch.tensor(column).int() for column in zip(*step, strict=True))
        first = (lengths.cumsum(0) - lengths).int()
        positions = torch.cat([torch.arange(s, s + n) for _, s, n in step]).int()
        hidden = torch.from_numpy(rng.normal(size=(len(positions), SIZE))).float()
        views = StepViews(rows, start, lengths, first, rows, rows, {})
        before = shift_hidden(ring, hidden, views, lengths, positions)
        place = 0
        for row, begin, length in step:
            for position in range(begin, begin + length):
                wanted = states[row].get(position - 1, torch.zeros(SIZE))
                assert before[place].equal(wanted), (step, row, position)
                states[row][position] = hidden[place]
                place += 1
