"""`Rows`: the columns of the running requests that the kinds of memory read, and `Steps`."""

from typing import NamedTuple, Protocol

import numpy as np

from minisgl.core.batch import Int32Array


class Prefixes(NamedTuple):
    """Numbers of leading tokens of a prompt with which other requests may begin.

    stable  the tokens before the generation prompt; 0: unknown.
    first   the tokens of the first message; 0: unknown.
    shared  those that waiting requests have in common with the prompt. The scheduler adds to it.
    """

    stable: int
    first: int
    shared: list[int]


class Fenced(Protocol):
    """Holds memory that a step in flight may still use."""

    def resolve(self) -> None:
        """Free the memory whose fence is at most Steps.resolved.

        Leaves Steps.waiting if no other memory waits.
        """


class Steps:
    """The numbers of the newest steps, and the memory that waits for their results.

    launched  the newest step that was launched.
    resolved  the newest completed step: the scheduler has read its result. Only the scheduler
              changes it, and then calls `resolve` of the holders in `waiting`.
    waiting   holders of memory with a fence above `resolved`; a dict keeps the order.
    """

    def __init__(self) -> None:
        self.launched = 0
        self.resolved = 0
        self.waiting: dict[Fenced, None] = {}


class Rows:
    """Rows 0 to R-1, one for each running request.

    tokens            int32 [R, max_seq_len]; prompt and known output tokens.
    known             int32 [R]; number of tokens whose ids are known to the host.
    computed          int32 [R]; number of tokens whose keys and values are cached, or are written
                      by a step that has been launched. Drafts of the step in flight count as
                      accepted.
    prefill_end       int32 [R]; number of tokens to forward as chunks. Later tokens are decoded. It
                      grows when forced tokens are appended.
    max_total_tokens  int32 [R]; limit of prompt and output tokens together.
    largest_span      int32 [R]; the most tokens that one chunk must have together, those of an
                      image; 1: the row has no such tokens.
    last_step         int64 [R]; the last launched step that contains the row.
    prefixes          [R]; where other requests may leave the tokens of the row.
    state_at          int32 [R]; the recurrent state of the row ends at the start of the page of
                      this token, after the last launched step. Only with such states.
    steps             the steps of the scheduler.
    """

    def __init__(self, num_rows: int, max_seq_len: int) -> None:
        self.steps = Steps()
        self.tokens: Int32Array = np.zeros((num_rows, max_seq_len), dtype=np.int32)
        self.known: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.computed: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.prefill_end: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.max_total_tokens: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.largest_span: Int32Array = np.ones(num_rows, dtype=np.int32)
        self.last_step = np.zeros(num_rows, dtype=np.int64)
        self.prefixes = [Prefixes(0, 0, [])] * num_rows
        self.state_at: Int32Array = np.zeros(num_rows, dtype=np.int32)
