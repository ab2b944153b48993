"""Per-row state of the running requests, as columns.

A step then uses a few array operations instead of Python loops over the requests.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from minisgl.core import FinishReason, InvariantBroken
from minisgl.core.batch import (
    Batch,
    EditedReq,
    EngineLike,
    History,
    Int32Array,
    LogprobsRequest,
    PageUpdates,
    StateCopies,
    StepResult,
)
from minisgl.core.columns import SamplingArrays
from minisgl.core.rows import Rows
from minisgl.engine import Extensions
from minisgl.engine.logits_processing import Constraint
from minisgl.images.positions import rotary_delta
from minisgl.kvcache.fenced_pool import FencedPool
from minisgl.scheduler.request import Req


class NewTokens(NamedTuple):
    """Tokens that have been appended to rows.

    rows    int32 [n]; the row of each token.
    tokens  int32 [n]; in the same order.
    ended   the reason of each row that ends.
    """

    rows: Int32Array
    tokens: Int32Array
    ended: dict[int, FinishReason]


class RequestTable(Rows):
    """Rows 0 to R-1 and their columns. A row belongs to at most one request.

    eos_token_ids int32; the EOS ids of the model.
    rows          the free rows; rows.allocated[row] is True while the row belongs to a request.
    reqs          the request of each row; None for a free row.
    uid           int64 [R]; uid of the request.
    stop_from     int32 [R]; tokens from this position on may stop the request.
    dropped_until int64 [R]; steps up to this one give the row no tokens, because forced tokens have
                  taken the positions, or because an earlier step gave no token.
    obeys_eos     bool [R]; the model's EOS ids end the request.
    has_stop_ids  bool [R]; the request has stop token ids of its own.
    edits_logits  bool [R]; at least one logits processor has a state for the request.
    has_logprobs  bool [R]; the request asks for log-probabilities.
    has_images    bool [R]; the request has images.
    rope_delta    int32 [R]; as RopePositions.deltas.
    may_draft     bool [R]; a step may forward draft tokens of the request. False if the request
                  asks for log-probabilities, or if a state edits its logits and masks no drafts.
    made          int32 [R]; drafts that the draft head has made after the row's last step.
    slow          bool [R]; Req.slow.
    priority      int32 [R]; Req.priority.
    client        int32 [R]; the number of the client (WaitingQueue.clients).
    call          int64 [R]; Req.call.
    running       bool [R]; the row belongs to a request in state PREFILL or DECODE.
    special       the rows of requests with stop token ids, edited logits, log-probabilities or
                  images. While it is empty, a step does not read the columns of these.

    I1  A row is released with its last step as the fence, since that step may still write a token
        to the same row of the token pool.
    """

    def __init__(
        self, engine: EngineLike, extensions: Extensions, eos_token_ids: tuple[int, ...]
    ) -> None:
        num_rows = engine.max_running_reqs
        super().__init__(num_rows, engine.max_seq_len)
        self.eos_token_ids: Int32Array = np.array(eos_token_ids, dtype=np.int32)
        self._eos_ids = eos_token_ids
        self.rows = FencedPool(num_rows, self.steps)
        self._drafting = extensions.draft_lengths is not None
        self.reqs: list[Req | None] = [None] * num_rows
        self.uid = np.zeros(num_rows, dtype=np.int64)
        self.stop_from: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.dropped_until = np.zeros(num_rows, dtype=np.int64)
        self.obeys_eos = np.zeros(num_rows, dtype=np.bool_)
        self.has_stop_ids = np.zeros(num_rows, dtype=np.bool_)
        self.edits_logits = np.zeros(num_rows, dtype=np.bool_)
        self.has_logprobs = np.zeros(num_rows, dtype=np.bool_)
        self.has_images = np.zeros(num_rows, dtype=np.bool_)
        self.rope_delta: Int32Array = np.zeros(num_rows, dtype=np.int32)
        images = engine.images
        self._merge = 1 if images is None else images.merge
        self._has_mixed = images is not None and images.mixed
        self.may_draft = np.zeros(num_rows, dtype=np.bool_)
        self.made: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.slow = np.zeros(num_rows, dtype=np.bool_)
        self.priority: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.client: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.call = np.zeros(num_rows, dtype=np.int64)
        self.running = np.zeros(num_rows, dtype=np.bool_)
        self.special: set[int] = set()
        self._columns = extensions.sampling_columns
        self._sampling = {c.name: np.zeros(num_rows, dtype=c.dtype) for c in self._columns}
        # The newest rows of a batch, and their sampling columns: most steps have the rows of the
        # step before. An array of rows is never changed, and a row leaves it before its request
        # leaves the row.
        self._sampled: tuple[Int32Array, SamplingArrays] = np.empty(0, dtype=np.int32), {}
        self._last_dropped = 0  # the largest value in dropped_until

    def req_at(self, row: int) -> Req:
        """Return the request that `row` belongs to."""
        req = self.reqs[row]
        assert req is not None, f"row {row} must belong to a request; this is a bug"
        return req

    def open_row(self, req: Req, computed: int) -> None:
        """Give `req` a row. The keys and values of its first `computed` tokens are cached."""
        row = int(self.rows.allocate(1)[0])
        length, sampling = len(req.tokens), req.sampling
        req.row = row
        self.reqs[row] = req
        self.last_step[row] = self.dropped_until[row] = 0
        self.uid[row] = req.uid
        self.tokens[row, :length] = req.tokens
        self.known[row] = self.prefill_end[row] = length
        self.computed[row] = computed
        self.max_total_tokens[row] = req.max_total_tokens
        self.largest_span[row] = req.largest_span
        self.prefixes[row] = req.prefixes
        self.stop_from[row] = min(req.prompt_len + sampling.min_tokens, req.max_total_tokens)
        # With a grammar, EOS ends the request even if ignore_eos is set: the grammar then masks EOS
        # until it allows no other token.
        self.obeys_eos[row] = not sampling.ignore_eos or sampling.grammar is not None
        self.has_stop_ids[row] = bool(sampling.stop_token_ids)
        self.edits_logits[row] = bool(req.logit_states)
        self.has_logprobs[row] = (sampling.logprobs, sampling.prompt_logprobs) != (None, None)
        self.has_images[row] = bool(req.images)
        self.rope_delta[row] = rotary_delta(req.images, self._merge) if self._has_mixed else 0
        flags = self.has_stop_ids, self.edits_logits, self.has_logprobs, self.has_images
        if any(flag[row] for flag in flags):
            self.special.add(row)
        states = [state for state in req.logit_states if state is not None]
        masks_drafts = all(isinstance(s, Constraint) and s.masks_drafts for s in states)
        self.may_draft[row] = masks_drafts and not self.has_logprobs[row]
        if not self.may_draft[row]:
            req.prediction = req.prediction[:0]
        self.slow[row] = req.slow
        self.priority[row] = req.priority
        self.call[row] = req.call
        self.running[row] = True
        for column in self._columns:
            self._sampling[column.name][row] = column.read(sampling)

    def close_row(self, req: Req) -> None:
        """Release the row, for reuse after its last step. Copy the known tokens to req.tokens."""
        row = req.row
        if self.reqs[row] is not req:
            raise InvariantBroken(f"row {row} belongs to another request; this is a bug")
        req.tokens = self.tokens[row, : self.known[row]].copy()
        req.row = -1
        self.reqs[row] = None
        self.running[row] = False
        self.special.discard(row)
        self.rows.release(np.array([row], dtype=np.int32), int(self.last_step[row]))

    def read_result(self, batch: Batch, result: StepResult) -> NewTokens:
        """Append the sampled tokens to their rows and find the requests that end, errors first.

        A row gets no token if its request ended in the previous step, while this step was in
        flight. It gets no token either if forced tokens have taken the positions (dropped_until). A
        row with non-finite logits ends with ERROR and gets no token. Draft tokens that the step did
        not accept are subtracted from `computed`. The next step forwards tokens at their positions.
        """
        sampled = batch.samples & self.rows.allocated[batch.rows]
        if batch.step_id <= self._last_dropped:
            sampled &= batch.step_id > self.dropped_until[batch.rows]
        if batch.drafting:
            taken = batch.step_id > self.dropped_until[batch.rows[: batch.num_decode]]
            decoding = np.flatnonzero(taken)
            rows, rejected = batch.rows[decoding], (batch.lengths - result.counts)[decoding]
            self.computed[rows] -= rejected
            self.state_at[rows] -= np.where(self.last_step[rows] > batch.step_id, rejected, 0)
        valid = sampled & result.finite
        if np.count_nonzero(valid) == len(valid):  # the usual step: no copies
            return self.append_tokens(batch.rows, result.tokens, result.counts)
        broken = dict.fromkeys(batch.rows[sampled & ~valid].tolist(), FinishReason.ERROR)
        rows = batch.rows[valid]
        new = self.append_tokens(rows, result.tokens[valid], result.counts[valid])
        return NewTokens(new.rows, new.tokens, broken | new.ended)

    def drop_in_flight(self, rows: Int32Array) -> None:
        """Let the step in flight give these rows no tokens."""
        self.dropped_until[rows] = self.last_step[rows]
        self._last_dropped = self.steps.launched

    def append_tokens(self, rows: Int32Array, tokens: Int32Array, counts: Int32Array) -> NewTokens:
        """Append tokens[i, : counts[i]] to row rows[i].

        Drops the tokens after the token that ends a request.
        """
        width = tokens.shape[1]
        nth: Int32Array = np.arange(width, dtype=np.int32)
        first = self.known[rows]
        position: Int32Array = first[:, None] + nth
        # A token stops its request if it is an EOS id or stop token id that the request obeys.
        stops = np.zeros(tokens.shape, dtype=np.bool_)
        for eos_token_id in self._eos_ids:
            stops |= tokens == eos_token_id
        if np.count_nonzero(stops):
            stops &= self.obeys_eos[rows][:, None]
        if self.special:
            for index in np.flatnonzero(self.has_stop_ids[rows]).tolist():
                stop_ids = self.req_at(rows[index]).sampling.stop_token_ids
                stops[index] |= np.isin(tokens[index], stop_ids)
        if np.count_nonzero(stops):
            stops &= position >= self.stop_from[rows][:, None]
        ends = stops | (position >= self.max_total_tokens[rows][:, None] - 1)
        if width > 1:
            counts = counts.copy()
            ends &= nth < counts[:, None]
            ending = ends.any(axis=1)
            counts[ending] = ends[ending].argmax(axis=1) + 1
            kept = nth < counts[:, None]
            new_rows, new, positions = np.repeat(rows, counts), tokens[kept], position[kept]
        else:
            new_rows, new, positions = rows, tokens[:, 0], first
        self.tokens[new_rows, positions] = new
        self.known[rows] = first + counts
        ended = {}
        for index in np.flatnonzero(ends.any(axis=1)).tolist() if np.count_nonzero(ends) else ():
            stopped = stops[index, counts[index] - 1]
            ended[int(rows[index])] = FinishReason.STOP if stopped else FinishReason.LENGTH
        return NewTokens(new_rows, new, ended)

    def build_batch(
        self,
        rows: Int32Array,
        lengths: Int32Array,
        num_decode: int,
        updates: PageUpdates,
        states: StateCopies | None = None,
        next_drafts: int = 0,
    ) -> Batch:
        """Return the batch of the newest step: the next `lengths` tokens of each row.

        They count as computed.

        rows, lengths: int32 [B]; first the num_decode decoding rows, then the chunks. For the
        others see Batch.
        """
        start = self.computed[rows]
        ends = start + lengths
        chunk_ids = [
            self.tokens[row, first:end]
            for row, first, end in zip(
                rows[num_decode:], start[num_decode:], ends[num_decode:], strict=True
            )
        ]
        samples = ends >= self.prefill_end[rows]
        self.computed[rows], self.last_step[rows] = ends, self.steps.launched
        made = None
        if self._drafting:
            made = self.made[rows[:num_decode]]
            self.made[rows[:num_decode]], self.made[rows[num_decode:]] = next_drafts, 0
        if rows is not self._sampled[0]:
            columns = self._sampling.items()
            self._sampled = rows, {name: column[rows] for name, column in columns}
        edited, scored = list[int](), list[int]()
        if self.special:
            edited = np.flatnonzero(self.edits_logits[rows] & samples).tolist()
            scored = np.flatnonzero(self.has_logprobs[rows]).tolist()
        return Batch(
            step_id=self.steps.launched,
            num_decode=num_decode,
            rows=rows,
            start=start,
            lengths=lengths,
            samples=samples,
            chunk_ids=np.concatenate(chunk_ids) if chunk_ids else rows[:0],
            page_updates=updates,
            sampling=self._sampled[1],
            logit_edits=tuple(
                self._edited_req(index, int(rows[index]), int(ends[index])) for index in edited
            ),
            logprobs=tuple(
                self._logprobs_request(
                    index, int(rows[index]), int(start[index]), int(ends[index]), samples[index]
                )
                for index in scored
            ),
            drafting=self._drafting,
            histories=self._histories(rows, num_decode, samples) if self._drafting else (),
            states=states,
            next_drafts=next_drafts,
            made=made,
        )

    def _edited_req(self, index: int, row: int, position: int) -> EditedReq:
        """Return the request at `index` of a batch, which samples from edited logits.

        position: of the token to sample.
        """
        req = self.req_at(row)
        first_since_admission = position == self.prefill_end[row]
        history = self.tokens[row, :position].copy() if first_since_admission else None
        return EditedReq(index, position, req.prompt_len, history, req.logit_states)

    def _histories(
        self, rows: Int32Array, num_decode: int, samples: NDArray[np.bool_]
    ) -> tuple[History, ...]:
        """Return the tokens of the requests whose last chunk the batch contains."""
        chunk_rows = rows[num_decode:]
        found = []
        for row in chunk_rows[samples[num_decode:] & self.may_draft[chunk_rows]].tolist():
            req, tokens = self.req_at(row), self.tokens[row, : self.known[row]].copy()
            most = req.max_total_tokens - req.prompt_len
            found.append(History(row, tokens, req.prediction[:most]))
        return tuple(found)

    def _logprobs_request(
        self, index: int, row: int, start: int, end: int, samples: bool
    ) -> LogprobsRequest:
        """Return the log-probabilities that a batch reports of its tokens `start` to `end` - 1.

        samples: the batch also samples a token of the request.
        """
        req = self.req_at(row)
        sampled, prompt = req.sampling.logprobs, req.sampling.prompt_logprobs
        reports_prompt = prompt is not None and start < req.prompt_len - 1
        length = end - start if reports_prompt else 0
        targets: Int32Array = np.full(length, -1, dtype=np.int32)
        in_prompt = self.tokens[row, start + 1 : min(start + 1 + length, req.prompt_len)]
        targets[: len(in_prompt)] = in_prompt
        return LogprobsRequest(
            index,
            -1 if sampled is None or not samples else sampled,
            -1 if prompt is None or not reports_prompt else prompt,
            targets,
        )
