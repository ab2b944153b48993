"""Builds StepExtras for the steps in which some req asks for more than its next token."""

import numpy as np
from numpy.typing import NDArray

from minisgl.core import Int32Array, LogitEdits, StepExtras
from minisgl.scheduler.request import Req
from minisgl.scheduler.request_table import RequestTable

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
    asking: list[tuple[int, Req, int]] = []
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
            asking.append((index, req, end))
    return StepExtras(
        edits=_edits(asking, table, eos_token_ids),
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


def _edits(
    asking: list[tuple[int, Req, int]], table: RequestTable, eos_token_ids: tuple[int, ...]
) -> LogitEdits | None:
    """asking: the sampling reqs, by position in the batch, and where their next token stands."""
    penalised: list[tuple[float, ...]] = []
    bias: list[tuple[int, int, float]] = []
    history: list[tuple[int, Int32Array]] = []
    for index, req, position in asking:
        asked = req.sampling
        bias += [(index, token, value) for token, value in asked.logit_bias.items()]
        if position < table.stop_from[req.row]:
            ends = asked.stop_token_ids + (() if asked.ignore_eos else eos_token_ids)
            bias += [(index, token, _NEVER) for token in set(ends)]
        if asked.has_penalties:
            penalties = asked.frequency_penalty, asked.presence_penalty, asked.repetition_penalty
            penalised.append((index, *penalties, req.prompt_len))
            if position == table.prefill_end[req.row]:  # its first sampling since admission
                history.append((req.row, table.tokens[req.row, :position].copy()))
    if not penalised and not bias:
        return None
    columns = np.array(penalised, dtype=np.float64).reshape(-1, 5).T
    bias_columns = np.array(bias, dtype=np.float64).reshape(-1, 3).T
    lengths = [len(ids) for _, ids in history]
    return LogitEdits(
        index=columns[0].astype(np.int32),
        frequency=columns[1].astype(np.float32),
        presence=columns[2].astype(np.float32),
        repetition=columns[3].astype(np.float32),
        prompt_len=columns[4].astype(np.int32),
        bias_index=bias_columns[0].astype(np.int32),
        bias_ids=bias_columns[1].astype(np.int32),
        bias_values=bias_columns[2].astype(np.float32),
        history_rows=np.repeat(np.array([row for row, _ in history], dtype=np.int32), lengths),
        history_cols=_joined([np.arange(n, dtype=np.int32) for n in lengths]),
        history_ids=_joined([ids for _, ids in history]),
    )


def _joined(parts: list[Int32Array]) -> Int32Array:
    return np.concatenate([np.empty(0, dtype=np.int32), *parts])
