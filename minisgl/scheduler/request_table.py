"""Per-row state of the running reqs as columns: a step costs array operations, not loops."""

import numpy as np

from minisgl.core import Int32Array, InvariantBroken, SamplingArrays
from minisgl.kvcache import FencedPool
from minisgl.scheduler.request import Req


class RequestTable:
    """Rows 0..R-1 and their columns. A row belongs to at most one req.

    rows        which are free; rows.allocated[row] while it belongs to a req.
    tokens      int32 [R, max_seq_len]; prompt and known outputs.
    known       int32 [R]; tokens whose ids the host has.
    computed    int32 [R]; tokens whose KV is written by launched steps.
    prefill_end int32 [R]; tokens to forward as chunks; from there on the row decodes.
    limit       int32 [R]; most tokens in all.
    last_step   int64 [R]; the last launched step that contains the row.
    page_table  int32 [R, max_pages]; num_pages int32 [R] valid entries; those from
                clean_pages int32 [R] on are not on the device yet.

    I1  A row is given up with its last step as fence, since that may still write a token into the
        row's line of the token pool.
    """

    def __init__(self, num_rows: int, max_seq_len: int, max_pages: int) -> None:
        self.rows = FencedPool(num_rows)
        self.reqs: list[Req | None] = [None] * num_rows
        self.tokens: Int32Array = np.zeros((num_rows, max_seq_len), dtype=np.int32)
        self.page_table: Int32Array = np.zeros((num_rows, max_pages), dtype=np.int32)
        self.uid = np.zeros(num_rows, dtype=np.int64)
        self.known: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.computed: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.prefill_end: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.limit: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.stop_from: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.num_pages: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.clean_pages: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.last_step = np.zeros(num_rows, dtype=np.int64)
        self.obeys_eos = np.zeros(num_rows, dtype=np.bool_)
        self.has_stop_ids = np.zeros(num_rows, dtype=np.bool_)
        self.has_extras = np.zeros(num_rows, dtype=np.bool_)
        self._sampling = SamplingArrays(
            temperature=np.zeros(num_rows, dtype=np.float32),
            top_k=np.zeros(num_rows, dtype=np.int32),
            top_p=np.ones(num_rows, dtype=np.float32),
            min_p=np.zeros(num_rows, dtype=np.float32),
            seed=np.zeros(num_rows, dtype=np.int64),
        )

    def req_at(self, row: int) -> Req:
        """The req that `row` belongs to."""
        req = self.reqs[row]
        assert req is not None, "a running row has a req: this is a bug"
        return req

    def open_row(self, req: Req, pages: Int32Array, computed: int) -> None:
        """Give `req` a row; `computed` of its tokens are cached in the first of `pages`."""
        row = int(self.rows.allocate(1)[0])
        length, sampling = len(req.tokens), req.sampling
        req.row = row
        self.reqs[row] = req
        self.last_step[row] = 0
        self.uid[row] = req.uid
        self.tokens[row, :length] = req.tokens
        self.page_table[row, : len(pages)] = pages
        self.num_pages[row], self.clean_pages[row] = len(pages), 0
        self.known[row] = self.prefill_end[row] = length
        self.computed[row] = computed
        self.limit[row] = req.max_total_tokens
        self.stop_from[row] = min(req.prompt_len + sampling.min_tokens, req.max_total_tokens)
        self.obeys_eos[row] = not sampling.ignore_eos
        self.has_stop_ids[row] = bool(sampling.stop_token_ids)
        self.has_extras[row] = sampling.has_extras
        self._sampling.temperature[row] = sampling.temperature
        self._sampling.top_k[row] = max(sampling.top_k, 0)
        self._sampling.top_p[row] = sampling.top_p
        self._sampling.min_p[row] = sampling.min_p
        self._sampling.seed[row] = req.seed

    def close_row(self, req: Req) -> None:
        """Take the row back, to be reused after its last step; `req.tokens` keeps what is known."""
        row = req.row
        if self.reqs[row] is not req:
            raise InvariantBroken(f"row {row} is given up by a stranger; this is a bug")
        req.tokens = self.tokens[row, : self.known[row]].copy()
        req.row = -1
        self.reqs[row] = None
        self.rows.release(np.array([row], dtype=np.int32), int(self.last_step[row]))

    def sampling(self, rows: Int32Array) -> SamplingArrays:
        """Copies of the sampling columns of `rows`."""
        return SamplingArrays._make(column[rows] for column in self._sampling)

    def check_integrity(self) -> None:
        """Raise InvariantBroken unless each row is free, fenced, or its req's own."""
        self.rows.check_integrity()
        owned = [row for row, req in enumerate(self.reqs) if req is not None]
        if owned != np.flatnonzero(self.rows.allocated).tolist():
            raise InvariantBroken("a row is lost or owned twice; this is a bug")
        if any(req is not None and req.row != row for row, req in enumerate(self.reqs)):
            raise InvariantBroken("a req does not know its row; this is a bug")
