"""Builds StepExtras for the steps in which some req asks for more than its next token."""

import numpy as np
from numpy.typing import NDArray

from minisgl.core import Int32Array, LogitEdits, StepExtras
from minisgl.scheduler.req import Req
from minisgl.scheduler.table import RequestTable

_NEVER = float("-inf")


def build_extras(
    table: RequestTable,
    rows: Int32Array,
    start: Int32Array,
    lengths: Int32Array,
    samples: NDArray[np.bool_],
    eos_token_ids: tuple[int, ...],
) -> StepExtras | None:
    """The extras of a batch with these columns, or None: nearly always, and then for free."""
    wanting = np.flatnonzero(table.has_extras[rows]).tolist()
    if not wanting:
        return None
    logprobs: Int32Array = np.full(len(rows), -1, dtype=np.int32)
    prompt_logprobs: Int32Array = logprobs.copy()
    targets: list[Int32Array] = []
    edits = _EditsBuilder(eos_token_ids)
    for index in wanting:
        row, first, end = int(rows[index]), int(start[index]), int(start[index] + lengths[index])
        req = table.req_at(row)
        sampling = req.sampling
        if sampling.prompt_logprobs is not None and first < req.prompt_len - 1:
            prompt_logprobs[index] = sampling.prompt_logprobs
            targets.append(_targets(table, req, first, end))
        if samples[index]:
            if sampling.logprobs is not None:
                logprobs[index] = sampling.logprobs
            edits.add(index, req, table, position=end)
    return StepExtras(
        edits=edits.build(),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        prompt_targets=_joined(targets),
    )


def _targets(table: RequestTable, req: Req, first: int, end: int) -> Int32Array:
    """The prompt token after each of the positions first..end - 1, -1 behind the prompt."""
    targets: Int32Array = np.full(end - first, -1, dtype=np.int32)
    known = table.tokens[req.row, first + 1 : min(end + 1, req.prompt_len)]
    targets[: len(known)] = known
    return targets


class _EditsBuilder:
    """LogitEdits in the making."""

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos = eos_token_ids
        self._penalised: list[tuple[int, tuple[float, float, float], int]] = []
        self._bias: list[tuple[int, int, float]] = []
        self._history: list[tuple[int, Int32Array]] = []

    def add(self, index: int, req: Req, table: RequestTable, position: int) -> None:
        """The edits of one sampling req whose next token stands at `position`."""
        asked = req.sampling
        self._bias += [(index, token, bias) for token, bias in asked.logit_bias.items()]
        if position < table.stop_from[req.row]:
            ends = asked.stop_token_ids + (() if asked.ignore_eos else self._eos)
            self._bias += [(index, token, _NEVER) for token in set(ends)]
        if asked.has_penalties:
            penalties = asked.frequency_penalty, asked.presence_penalty, asked.repetition_penalty
            self._penalised.append((index, penalties, req.prompt_len))
            if position == table.prefill_end[req.row]:  # its first sampling since admission
                self._history.append((req.row, table.tokens[req.row, :position].copy()))

    def build(self) -> LogitEdits | None:
        if not self._penalised and not self._bias:
            return None
        values = [penalties for _, penalties, _ in self._penalised]
        floats = np.array(values, dtype=np.float32).reshape(-1, 3)
        rows = np.array([row for row, _ in self._history], dtype=np.int32)
        lengths = [len(ids) for _, ids in self._history]
        return LogitEdits(
            index=np.array([index for index, _, _ in self._penalised], dtype=np.int32),
            frequency=floats[:, 0].copy(),
            presence=floats[:, 1].copy(),
            repetition=floats[:, 2].copy(),
            prompt_len=np.array([length for _, _, length in self._penalised], dtype=np.int32),
            bias_index=np.array([index for index, _, _ in self._bias], dtype=np.int32),
            bias_ids=np.array([token for _, token, _ in self._bias], dtype=np.int32),
            bias_values=np.array([bias for _, _, bias in self._bias], dtype=np.float32),
            history_rows=np.repeat(rows, lengths),
            history_cols=_joined([np.arange(n, dtype=np.int32) for n in lengths]),
            history_ids=_joined([ids for _, ids in self._history]),
        )


def _joined(parts: list[Int32Array]) -> Int32Array:
    return np.concatenate([np.empty(0, dtype=np.int32), *parts])
