"""The recurrent states of the fake engine's rows: sums over the first tokens of a row.

The state of a row follows the rule of EngineLike: it holds whole pages of tokens, and a short
history has the tokens after them. A step checks the state and the history that it reads against
the KV slots of all its tokens. A snapshot is a sum and a number of tokens, spread over the slots of
its pages, so that a write to one of them is found.
"""

import numpy as np

from minisgl.core.batch import StateCopies


class FakeStates:
    """The states of all rows.

    sums, tokens  [R]; of each state, and the number of tokens in it.
    histories     the slot value of each position after them, by row.
    """

    def __init__(self, num_rows: int, page_size: int) -> None:
        self.page_size = page_size
        self.sums = np.zeros(num_rows, dtype=np.uint64)
        self.tokens = np.full(num_rows, -1, dtype=np.int64)
        self.histories: list[dict[int, np.uint64]] = [{} for _ in range(num_rows)]

    def copy(self, copies: StateCopies, slots: np.ndarray) -> None:
        """Run the copies of a batch. slots: the KV slots, [pages, page_size]."""
        self.save(copies, slots)
        self.load(copies, slots)

    def save(self, copies: StateCopies, slots: np.ndarray) -> None:
        for row, pages in zip(copies.save_rows.tolist(), copies.save_pages, strict=True):
            assert len(set(pages.tolist())) == len(pages), "a snapshot has a page twice"
            slots[pages] = encoded(self.sums[row], self.tokens[row], slots[pages].shape)

    def load(self, copies: StateCopies, slots: np.ndarray) -> None:
        for row, pages in zip(copies.load_rows.tolist(), copies.load_pages, strict=True):
            self.sums[row], self.tokens[row] = decoded(slots[pages])
            self.histories[row] = {}

    def forward(self, row: int, start: int, slots: np.ndarray, is_chunk: bool, last: bool) -> None:
        """Forward the tokens of a row from `start` on. slots: the values of all its tokens.

        last: the chunk ends its prompt.
        """
        size, end, history = self.page_size, len(slots), self.histories[row]
        base, end_base = start - start % size, (end - 1) - (end - 1) % size
        if base:
            if self.tokens[row] == base - size:  # the row has entered a new page
                page = [history[position] for position in range(base - size, base)]
                self.sums[row] = np.array([self.sums[row], *page]).sum(dtype=np.uint64)
            else:
                assert self.tokens[row] == base, "a state of the wrong position was read"
            true = slots[:base].sum(dtype=np.uint64)
            assert self.sums[row] == true, "a state was read that does not hold its tokens"
        in_page = [history[position] for position in range(base, start)]
        assert in_page == slots[base:start].tolist(), "a history was read of other tokens"
        if is_chunk:
            assert last or end % size == 0, "a chunk ends neither its prompt nor a page"
            assert start == base or end <= base + size, "a chunk leaves the page in which it starts"
        self.tokens[row] = end_base if is_chunk else base
        self.sums[row] = slots[: self.tokens[row]].sum(dtype=np.uint64)
        for position in range(start, end):
            history[position] = slots[position]


def encoded(total: np.uint64, tokens: int, shape: tuple[int, ...]) -> np.ndarray:
    """The slots of a snapshot: the sum, the number of tokens, and values that follow from both."""
    values = np.arange(np.prod(shape), dtype=np.uint64) ^ total
    values[:2] = total, tokens
    return values.reshape(shape)


def decoded(slots: np.ndarray) -> tuple[np.uint64, int]:
    """The sum and the number of tokens of a snapshot."""
    total, tokens = slots.ravel()[:2]
    assert (slots == encoded(total, int(tokens), slots.shape)).all(), "a snapshot was overwritten"
    assert tokens < 2**31, "a snapshot was loaded that no step has saved"
    return total, int(tokens)
