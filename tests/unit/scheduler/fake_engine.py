"""An engine without a model, whose tokens depend on every KV slot that a real engine would read.

Each KV slot holds the hash of the token written there and its position. The next token is a hash
over all slots from 0 to the last position, read through the engine's own page table. So the token
changes if a page is freed too early, if a page-table entry is stale, if a chunk is lost, or if a
token is written into a reused row.
Window layers have slots of their own, with the same contents. The engine checks all slots of the
windows of a step's tokens.
A step runs as late as possible, when its result is read, as on a slow GPU.

In steps with drafts the engine keeps the length of each row, as a real engine does on the device.
Its drafts are right, wrong, or right up to some position (Drafter). If the last two tokens of a
request stand in its prediction, its drafts are the tokens after them instead.
"""

from collections.abc import Callable

import numpy as np

from minisgl.core.batch import Batch, Int32Array, StepResult, WindowLayers
from minisgl.core.config import MAX_DRAFTS
from minisgl.core.images import ImageLimits
from tests.unit.scheduler.fake_images import FakeImages
from tests.unit.scheduler.fake_states import FakeStates

VOCAB = 64
EOS = 0

# Returns whether the draft token of a row at a position is right.
Drafter = Callable[[int, int], bool]
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


class FakeCopier:
    """Implements core.PageCopier. A copy reads and writes when it ends, as late as possible.

    Until then, the pages of a load hold noise. A step that reads them gets a wrong token.

    may_end  the number of copies of each direction that may end without a wait.
    loads    the number of copies to the engine.
    num_open the number of blocks that may be used before `wait_open` asks for more.
    is_opening
             num_open may still grow.
    waits    the number of waits in which no copy ends, before one that ends a copy.
    """

    def __init__(self, engine: "FakeEngine", num_blocks: int) -> None:
        self._engine, self.num_blocks, self.block_bytes = engine, num_blocks, 100
        self.num_open, self.is_opening = num_blocks, False
        self.blocks = np.zeros((num_blocks, engine.page_size), dtype=np.uint64)
        self.open: dict[int, tuple[Int32Array, Int32Array, bool]] = {}
        self.reported: set[int] = set()
        self.may_end, self.loads = [0, 0], 0
        self.waits = self._waited = 0

    def start_opening(self) -> None:
        """A test sets num_open."""

    def wait_open(self, count: int) -> None:
        self.num_open = max(self.num_open, count)

    @property
    def pages(self) -> np.ndarray:
        return self._engine.slots.reshape(-1, self._engine.page_size)

    def start(self, job: int, pages: Int32Array, blocks: Int32Array, load: bool) -> None:
        """Check that no other copy uses the pages or the blocks."""
        assert len(pages) == len(blocks) == len({*pages.tolist()}) == len({*blocks.tolist()})
        for other_pages, other_blocks, _ in self.open.values():
            assert not np.isin(pages, other_pages).any()
            assert not np.isin(blocks, other_blocks).any()
        self.open[job] = pages.copy(), blocks.copy(), load
        self.loads += load
        if load:
            self.pages[pages] = np.uint64(0xDEAD)

    def done(self, wait_s: float) -> list[int]:
        news = [job for job in self.open if job not in self.reported]
        ended = []
        for load in (False, True):
            of_direction = [job for job in news if self.open[job][2] == load]
            count = self.may_end[load]
            ended += of_direction[:count]
            self.may_end[load] = max(count - len(of_direction), 0)
        if not ended and wait_s:
            self._waited += 1
            ended = news[:1] if self._waited > self.waits else []
        if ended:
            self._waited = 0
        self.reported.update(ended)
        return ended

    def finish(self, job: int) -> None:
        pages, blocks, load = self.open.pop(job)
        self.reported.discard(job)
        if load:
            self.pages[pages] = self.blocks[blocks]
        else:
            self.blocks[blocks] = self.pages[pages]


class FakeEngine:
    """Implements core.EngineLike.

    eager               steps run at launch.
    drafter             says which drafts are right; None: the engine makes no drafts.
    lengths             int32 [rows]; tokens of each row with a KV slot, kept in steps with drafts.
    break_prompts_with  logits of steps that forward this token are not finite.
    window              the model has window layers as well.
    snapshot_pages      as in core.EngineLike.
    copier              copies slots to host memory, if it has blocks.
    images              as in core.EngineLike.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_running_reqs: int = 8,
        max_seq_len: int = 256,
        eager: bool = False,
        drafter: Drafter | None = None,
        window: WindowLayers | None = None,
        snapshot_pages: int = 0,
        host_blocks: int = 0,
        images: ImageLimits | None = None,
    ) -> None:
        self.images, self.image_rows = images, FakeImages(images)
        self.drafter = drafter
        self.lengths: Int32Array = np.full(max_running_reqs, -1, dtype=np.int32)
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_running_reqs = max_running_reqs
        self.max_seq_len = max_seq_len
        self.eager = eager
        # The last page is the dummy page.
        self.slots = np.zeros((num_pages + 1) * page_size, dtype=np.uint64)
        self.window, self.snapshot_pages = window, snapshot_pages
        self.copier = FakeCopier(self, host_blocks) if host_blocks else None
        self.states = FakeStates(max_running_reqs, page_size)
        window_pages = window.num_pages + 1 if window else 0  # the last one is the dummy page
        self.window_slots = np.zeros(window_pages * page_size, np.uint64)
        columns = -(-max_seq_len // page_size) + -(-MAX_DRAFTS // page_size)
        shape = 2, max_running_reqs + 1, columns
        self.page_tables: Int32Array = np.full(shape, -1, dtype=np.int32)
        self.predictions: dict[int, list[int]] = {}
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
        if batch.states is not None:
            self.states.copy(batch.states, self.slots.reshape(-1, self.page_size))
        self.image_rows.begin_step(batch.images)
        finite = np.ones(len(batch.rows), dtype=np.bool_)
        starts = batch.start.copy()
        if batch.drafting:
            for row, tokens, prediction in batch.histories:
                self.token_pool[row, : len(tokens)] = tokens
                self.predictions[row] = prediction.tolist()
            decode = slice(batch.num_decode)
            starts[decode] = self.lengths[batch.rows[decode]]
            assert (starts[decode] >= 0).all(), "a length was read that no step wrote"
            assert (starts <= batch.start).all(), "the start of a row is no upper bound"
        inputs, taken = [], 0
        predicted = np.zeros(len(batch.rows), dtype=np.bool_)
        for i in range(len(batch.rows)):  # the gather comes before any write of this step
            row, start, length = (int(a[i]) for a in (batch.rows, starts, batch.lengths))
            if i < batch.num_decode:
                if length > 1:
                    predicted[i] = self._write_drafts(row, start, length - 1)
                inputs.append(self.token_pool[row, start : start + length].copy())
                assert (inputs[-1] >= 0).all(), "a token was read that no step wrote"
            else:
                inputs.append(self.image_rows.pads(batch.chunk_ids[taken : taken + length]))
                taken += length
        width = max([1, *batch.lengths[: batch.num_decode].tolist()])
        tokens = np.zeros((len(batch.rows), width), dtype=np.int32)
        counts = np.zeros(len(batch.rows), dtype=np.int32)
        for i, ids in enumerate(inputs):
            row, start = int(batch.rows[i]), int(starts[i])
            where = self._slots_of(0, row, 0, start + len(ids))
            if i < batch.num_decode:
                self._overshoot(row, start, batch.width)
            self.slots[where[start:]] = slot_values(ids, start)
            if self.snapshot_pages:
                is_chunk, ends = i >= batch.num_decode, bool(batch.samples[i])
                self.states.forward(row, start, self.slots[where], is_chunk, ends)
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
            self.lengths[row] = start + (counts[i] if i < batch.num_decode else len(ids))
        if not batch.drafting:
            return StepResult(tokens, counts, finite)
        drafted = np.maximum(batch.lengths - 1, 0)
        drafted[batch.num_decode :] = 0
        agreed = np.minimum(counts - 1, drafted)
        drafts = {"drafted": drafted, "agreed": np.maximum(agreed, 0), "predicted": predicted}
        return StepResult(tokens, counts, finite, **drafts)

    def _overshoot(self, row: int, start: int, width: int) -> None:
        """Write noise to the slots of `width` tokens, as for drafts that a row cannot use."""
        tables = [self.slots] if self.window is None else [self.slots, self.window_slots]
        for table, slots in enumerate(tables):
            slots[self._slots_of(table, row, start, start + width)] = np.uint64(row + 1)

    def _write_drafts(self, row: int, start: int, count: int) -> bool:
        """Write `count` draft tokens after the last token of a row, which is at position `start`.

        The engine finds drafts in the tokens of the row, so all of them must be in the token pool.
        Returns whether the drafts come from the prediction.
        """
        assert self.drafter is not None, "the scheduler asked for drafts of an engine without them"
        tokens = self.token_pool[row]
        assert (tokens[: start + 1] >= 0).all(), "a token is missing in the token pool"
        cached = self.slots[self._slots_of(0, row, 0, start)]
        image = -1 if self.images is None else self.images.token
        same = (cached == slot_values(tokens[:start], 0)) | (tokens[:start] == image)
        assert same.all(), "the token pool has another token"
        prediction, end = self.predictions[row], tokens[start - 1 : start + 1].tolist()
        for place in range(len(prediction) - 2):
            if prediction[place : place + 2] == end:
                found = (prediction[place + 2 :] * count)[:count]
                tokens[start + 1 : start + 1 + count] = found
                return True
        for position in range(start + 1, start + 1 + count):
            new = slot_values(tokens[start:position], start)
            right = next_token(np.concatenate([cached, new]))
            is_right = self.drafter(row, position)
            tokens[position] = right if is_right else (right + 1) % VOCAB
        return False

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
