"""An engine without a model, whose tokens depend on every KV slot that a real engine would read.

Each KV slot holds the hash of the token written there and its position. The next token is a hash
over all slots from 0 to the last position, read through the engine's own page table. So the token
changes if a page is freed too early, if a page-table entry is stale, if a chunk is lost, or if a
token is written into a reused row.
Window layers have slots of their own, with the same contents. The engine checks all slots of the
windows of a step's tokens.
A step runs as late as possible, when its result is read, as on a slow GPU.
"""

import numpy as np

from minisgl.core import Batch, Int32Array, StepResult, WindowLayers

VOCAB = 64
EOS = 0
_MIX = np.uint64(0x9E3779B97F4A7C15)


def _mixed(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(31))) * _MIX
    return (values ^ (values >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)


def slot_values(tokens: np.ndarray, first_position: int) -> np.ndarray:
    """Return the contents of the KV slots of `tokens`, the first one at `first_position`."""
    positions = np.arange(first_position, first_position + len(tokens), dtype=np.uint64)
    return _mixed(tokens.astype(np.uint64) * np.uint64(1_000_003) + positions + np.uint64(1))


def next_token(slots: np.ndarray) -> int:
    """Return the token after the sequence whose slots are given."""
    total = _mixed(slots + np.arange(len(slots), dtype=np.uint64)).sum(dtype=np.uint64)
    return int(_mixed(np.array([total], dtype=np.uint64))[0] % np.uint64(VOCAB))


def expected_output(prompt: list[int], max_tokens: int, ignore_eos: bool) -> list[int]:
    """Return the output of the plain computation, without cache, chunks or batch."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        token = next_token(slot_values(np.array(tokens), 0))
        tokens.append(token)
        if token == EOS and not ignore_eos:
            break
    return tokens[len(prompt) :]


class _Pending:
    def __init__(self, engine: "FakeEngine", batch: Batch) -> None:
        self.engine = engine
        self.batch = batch
        self.result: StepResult | None = None

    def done(self) -> bool:
        return self.result is not None

    def wait(self) -> StepResult:
        self.engine.run_until(self)
        assert self.result is not None
        return self.result


class FakeEngine:
    """Implements core.EngineLike.

    eager               steps run at launch.
    break_prompts_with  logits of steps that forward this token are not finite.
    window              the model has window layers as well.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_running_reqs: int = 8,
        max_seq_len: int = 256,
        eager: bool = False,
        window: WindowLayers | None = None,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_running_reqs = max_running_reqs
        self.max_seq_len = max_seq_len
        self.eager = eager
        self.slots = np.zeros(num_pages * page_size, dtype=np.uint64)
        self.window = window
        self.window_slots = np.zeros(window.num_pages * page_size if window else 0, np.uint64)
        shape = 2, max_running_reqs + 1, -(-max_seq_len // page_size)
        self.page_tables: Int32Array = np.full(shape, -1, dtype=np.int32)
        self.token_pool: Int32Array = np.full((max_running_reqs, max_seq_len + 1), -1, np.int32)
        self.queue: list[_Pending] = []
        self.batches: list[Batch] = []
        self.break_prompts_with: int | None = None

    def launch(self, batch: Batch) -> _Pending:
        pending = _Pending(self, batch)
        self.queue.append(pending)
        self.batches.append(batch)
        if self.eager:
            self.run_until(pending)
        return pending

    def run_until(self, pending: _Pending) -> None:
        while pending.result is None:
            head = self.queue.pop(0)
            head.result = self._run(head.batch)

    def _run(self, batch: Batch) -> StepResult:
        assert len(set(batch.rows.tolist())) == len(batch.rows), "the batch contains a row twice"
        updates = batch.page_updates
        pairs = list(zip(updates.rows.tolist(), updates.cols.tolist(), strict=True))
        assert len(set(pairs)) == len(pairs), "the batch updates a page-table entry twice"
        stacked = self.page_tables.reshape(-1, self.page_tables.shape[2])
        stacked[updates.rows, updates.cols] = updates.ids
        finite = np.ones(batch.num_reqs, dtype=np.bool_)
        inputs, taken = [], 0
        for i in range(batch.num_reqs):  # the gather comes before any write of this step
            row, start, length = (int(a[i]) for a in (batch.rows, batch.start, batch.lengths))
            if i < batch.num_decode:
                inputs.append(self.token_pool[row, start : start + length].copy())
            else:
                inputs.append(batch.chunk_ids[taken : taken + length])
                taken += length
        width = max([1, *batch.lengths[: batch.num_decode].tolist()])
        tokens = np.zeros((batch.num_reqs, width), dtype=np.int32)
        counts = np.zeros(batch.num_reqs, dtype=np.int32)
        for i, ids in enumerate(inputs):
            row, start = int(batch.rows[i]), int(batch.start[i])
            assert (ids >= 0).all(), "a token was read that no step wrote"
            where = self._slots_of(0, row, 0, start + len(ids))
            self.slots[where[start:]] = slot_values(ids, start)
            if self.window is not None:
                first = max(start - self.window.tokens + 1, 0)
                within = self._slots_of(1, row, first, start + len(ids))
                self.window_slots[within[start - first :]] = slot_values(ids, start)
                written = self.window_slots[within] == self.slots[where[first:]]
                assert written.all(), "a window was read that does not hold its tokens"
            if batch.samples[i]:
                drafts = ids[1:].tolist() if i < batch.num_decode else []
                sampled = self._accept(where, drafts)
                counts[i] = len(sampled)
                tokens[i, : len(sampled)] = sampled
                first = start + len(ids) - len(drafts)
                self.token_pool[row, first : first + len(sampled)] = sampled
                broken = self.break_prompts_with
                finite[i] = broken is None or broken not in ids
        return StepResult(tokens, counts, finite)

    def _slots_of(self, table: int, row: int, first: int, end: int) -> np.ndarray:
        positions = np.arange(first, end)
        pages = self.page_tables[table, row, positions // self.page_size]
        assert (pages >= 0).all(), "a page-table entry was read that no step wrote"
        return pages * self.page_size + positions % self.page_size

    def _accept(self, where: np.ndarray, drafts: list[int]) -> list[int]:
        """Return the sampled tokens: the tokens that agree with the drafts, and one more token.

        where: slots of the context and of the drafts, which come last.
        """
        sampled: list[int] = []
        for index in range(len(drafts) + 1):
            sampled.append(next_token(self.slots[where[: len(where) - len(drafts) + index]]))
            if index < len(drafts) and sampled[-1] != drafts[index]:
                break
        return sampled
