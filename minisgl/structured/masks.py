"""`MaskComputer`: the token masks of one step, the rows of each client within a limit of time."""

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import torch
from llguidance import LLExecutor, LLTokenizer
from numpy.typing import NDArray
from torch import Tensor

from minisgl.engine.logits_processing import MaskedRows
from minisgl.structured.matcher import GrammarState, allows
from minisgl.utils.process import usable_cores

MAX_MASK_THREADS = 8
MAX_CLIENT_S = 0.004  # masks of one client in one step; an ordinary mask takes 0.00002 s


class Position(NamedTuple):
    """A position of an output that a step samples.

    state   the grammar; None: the output ends before the position.
    row     the row of its logits.
    drafts  the draft of this position and those after it.
    tokens  the tokens before the position that the state has not followed.
    """

    state: GrammarState | None
    row: int
    drafts: Sequence[int]
    tokens: Sequence[int]

    @property
    def ready(self) -> bool:
        """The mask needs no computation."""
        return self.state is None or (self.state.ready is not None and not self.tokens)


class MaskComputer:
    """Computes masks with the threads of llguidance.

    The library cannot stop while it computes a mask, and its limits bound the time of one mask only
    to some milliseconds. A client with many rows could therefore delay the step of all others. The
    rows of each client are computed in small groups, until they have taken MAX_CLIENT_S. The step
    withholds the other rows of this client (GrammarState.prepare).
    """

    def __init__(self, tokenizer: Future[LLTokenizer]) -> None:
        self._tokenizer = tokenizer
        threads = max(1, min(usable_cores() // 2, MAX_MASK_THREADS))
        self._library = LLExecutor(threads)
        # With groups of one row, the library computes in the calling thread. The clock then leaves
        # out the time in which other processes use the core.
        self._group = 2 * threads if threads > 1 else 1
        self._clock = time.perf_counter if threads > 1 else time.thread_time

    def compute(
        self, clients: Mapping[str, Sequence[Position]], device: torch.device
    ) -> MaskedRows:
        """Let the states follow their tokens and compute the masks of these positions and drafts.

        clients: the positions of each client. A draft that the mask of its position forbids is
        never accepted, so the positions after it get no mask.
        """
        words = -(-self._tokenizer.result().vocab_size // 32)
        most = sum(1 + len(p.drafts) for positions in clients.values() for p in positions)
        # One transfer sends all masks, and after them all rows, of which some are withheld.
        size, pinned = most * (words + 2), device.type == "cuda"
        buffer = torch.empty(size, dtype=torch.int32, pin_memory=pinned)
        step = _Step(buffer, words, [], [])
        for positions in clients.values():
            self._compute(positions, step)
        count, rows = len(step.rows), [*step.rows, *step.withheld]
        end = count * words + len(rows)
        buffer[count * words : end] = torch.tensor(rows, dtype=torch.int32)
        sent = buffer[:end].to(device, non_blocking=True)
        masked = sent[count * words :]
        withheld = masked[count:] if step.withheld else None
        return MaskedRows(masked[:count], sent[: count * words].view(count, words), withheld)

    def _compute(self, positions: Sequence[Position], step: "_Step") -> None:
        """Compute the masks of one client, in groups of rows, each with the masks of its drafts."""
        ends_s = self._clock() + MAX_CLIENT_S
        ready = [position for position in positions if position.ready]
        others = [position for position in positions if not position.ready]
        # These masks take no time. So a row is withheld at most once for each token.
        self._compute_group(ready, step, math.inf)
        for start in range(0, len(others), self._group):
            group = others[start : start + self._group]
            if start and self._clock() > ends_s:
                step.withheld.extend(position.row for position in group)
            else:
                self._compute_group(group, step, ends_s)

    def _compute_group(self, group: Sequence[Position], step: "_Step", ends_s: float) -> None:
        """Compute masks until ends_s, but at least those of the first position of each row.

        If the masks of drafts are not complete by then, the step withholds the whole rows.
        """
        level = group
        while level:
            self._follow(level)
            masks = step.take([position.row for position in level])
            self._fill([position.state for position in level], masks)
            level = _after_drafts(level, masks.numpy())
            if level and self._clock() > ends_s:
                step.withheld.extend(position.row for position in group)
                return

    def _follow(self, group: Sequence[Position]) -> None:
        """Let each state follow its tokens."""
        for nth in range(max(len(p.tokens) for p in group)):
            consumed = [
                (p.state.matcher, p.tokens[nth])
                for p in group
                if p.state is not None and nth < len(p.tokens) and p.state.count(p.tokens[nth])
            ]
            if consumed:
                self._library.consume_token_par(consumed)

    def _fill(self, states: Sequence[GrammarState | None], masks: Tensor) -> None:
        """Write the mask of each state. A mask without a state forbids all ids."""
        opened = [(state, i) for i, state in enumerate(states) if state is not None]
        pending = [(state, i) for state, i in opened if state.ready is None]
        while pending:
            targets = [(state.matcher, i) for state, i in pending if state.masked_by_grammar]
            if targets:
                words_bytes = masks.shape[1] * 4
                self._library.unsafe_compute_mask_ptr(
                    targets, masks.data_ptr(), words_bytes, len(masks)
                )
            tokenizer = self._tokenizer.result()
            pending = [(state, i) for state, i in pending if state.renew(tokenizer)]
        for state, mask in zip(states, masks.numpy(), strict=True):
            if state is None:
                mask[:] = 0
            elif state.ready is not None:
                mask[:] = state.ready
            else:
                state.complete(mask)


class _Step(NamedTuple):
    """The masks of a step so far.

    buffer    int32; begins with the masks of `words` words each, in the order of `rows`.
    withheld  the rows without a mask.
    """

    buffer: Tensor
    words: int
    rows: list[int]
    withheld: list[int]

    def take(self, rows: Sequence[int]) -> Tensor:
        """Return room for the masks of these rows, int32 [len(rows), words]."""
        room = self.buffer[len(self.rows) * self.words :][: len(rows) * self.words]
        self.rows.extend(rows)
        return room.view(-1, self.words)


def _after_drafts(group: Sequence[Position], masks: NDArray[np.int32]) -> list[Position]:
    """Return the positions that follow a draft which the mask of its position allows."""
    after = []
    for (state, row, drafts, _), mask in zip(group, masks, strict=True):
        if state is not None and drafts and allows(mask, drafts[0]):
            follower = state.before(drafts[0])
            after.append(Position(follower, row + 1, drafts[1:], drafts[:1]))
    return after
