"""Draft lengths, drafters and predictions for the fake engine."""

from collections.abc import Callable

from minisgl.core.batch import DecodeLoad, DraftCounts, DraftLengths, Int32Array
from tests.unit.scheduler.fake_engine import VOCAB, Drafter

DRAFTERS: dict[str, Drafter] = {
    "right": lambda row, position: True,
    "wrong": lambda row, position: False,
    "half right": lambda row, position: (row + position) % 4 < 2,
}


# Predictions of an output.
PREDICTIONS: dict[str, Callable[[list[int]], list[int]]] = {
    "none": lambda output: [],
    "right": lambda output: output,
    "wrong": lambda output: [(token + 1) % VOCAB for token in output],
    "half right": lambda output: [
        (token + (place % 6 > 3)) % VOCAB for place, token in enumerate(output)
    ],
    "too short": lambda output: output[:4],
    "too long": lambda output: output * 5,
}


class ChangingDrafts(DraftLengths):
    """Chooses another number of drafts in each step.

    The number depends on the lengths of the contexts, because a plan must not change it.

    head             the engine has a draft head. It makes another number of drafts in each step.
    drafted, agreed  totals of all steps.
    """

    def __init__(self, most: int, changing: bool = True, head: bool = False) -> None:
        self.most = most
        self.head = head
        self.changing = changing
        self.drafted = self.agreed = 0

    def choose(self, step: DecodeLoad) -> DraftCounts:
        forwarded, ahead = (
            min((5 * at) % (self.most + 1) if self.changing else self.most, step.limit)
            for at in (step.keys, step.keys + 1)
        )
        return DraftCounts(forwarded, ahead if self.head else 0)

    def record(
        self, rows: Int32Array, drafted: Int32Array, agreed: Int32Array, made: Int32Array
    ) -> None:
        self.drafted += int(drafted.sum())
        self.agreed += int(agreed.sum())
