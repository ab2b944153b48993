"""The contract between scheduler and engine: one forward step, and its result.

The scheduler builds a `Batch`, `EngineLike.launch` starts it, and `PendingStep.wait` returns a
`StepResult`. All arrays here are numpy arrays on the host; this module does not import torch.

Shape letters, used in the whole package: B requests in the step, T tokens in the step, P pages,
S page_size, U page-table updates, Hq / Hkv local query / KV heads, D head_dim, V width of the
logits, L layers, N rows of the tensors on the device (B plus padding).
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from minisgl.core.columns import SamplingArrays
from minisgl.core.config import DRAFT_WIDTHS
from minisgl.core.images import EncodeImage, ImageLimits, ImageSpan, RopePositions
from minisgl.core.page_copier import PageCopier
from minisgl.core.step_cost import StepCost, StepWork

Int32Array = NDArray[np.int32]
Array = TypeVar("Array")


class PageUpdates(NamedTuple):
    """Changes of the page tables: page_table[rows, cols] = ids. Each array is int32 [U].

    A model with window layers has two page tables of max_running_reqs + 1 rows each, one after the
    other: the pages of layers with full attention, then those of window layers.
    """

    rows: Int32Array
    cols: Int32Array
    ids: Int32Array

    def joined(self, others: "PageUpdates") -> "PageUpdates":
        """Return these changes and those of a further page table."""
        return PageUpdates(*map(np.concatenate, zip(self, others, strict=True)))


class StateCopies(NamedTuple):
    """Copies between the recurrent states of rows and pages of the KV pool.

    The engine runs all saves before all loads, and both before the layers of the step. A pool page
    of save_pages or load_pages holds a part of a state, and no keys and values.

    save_rows   int32 [S]; the rows whose state is saved.
    save_pages  int32 [S, P]; the pages that take the state of each row, P =
                EngineLike.snapshot_pages.
    load_rows   int32 [L]; the rows that begin with a saved state.
    load_pages  int32 [L, P]; the pages that hold it.
    """

    save_rows: Int32Array
    save_pages: Int32Array
    load_rows: Int32Array
    load_pages: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class EditedReq:
    """A request whose next token a step samples from edited logits.

    index       index of the request in the batch.
    position    position of the token that this step samples. For a decode request that may have
                drafts it is an upper bound, as Batch.start.
    prompt_len  position of the request's first output token.
    history     int32 [position]; the tokens of the request so far. Set only in the first step that
                samples for the request after the request got its row, or after the scheduler
                appended forced tokens. None in other steps. Tokens from the prefix cache and forced
                tokens do not pass through the token pool, so a processor that counts tokens needs
                this array.
    states      one state for each logits processor, as LogitsProcessor.open returned it.
    """

    index: int
    position: int
    prompt_len: int
    history: Int32Array | None
    states: tuple[Any, ...]


class History(NamedTuple):
    """The tokens in which the drafts of a request are found, int32.

    tokens      prompt and output, from position 0 on.
    prediction  the tokens that the client expects as output, if the request has some. Tokens for
                which the row has no room after `tokens` have no effect.
    """

    row: int
    tokens: Int32Array
    prediction: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class LogprobsRequest:
    """The log-probabilities that a step reports for one request, together with its tokens.

    index    index of the request in the batch.
    sampled  number of most likely tokens to report with the sampled token; -1: report none.
    prompt   number of most likely tokens to report with each prompt token of the chunk; -1: report
             none.
    targets  int32 [length of the chunk], or empty if `prompt` is -1; the prompt token that follows
             each position, -1 after the end of the prompt.
    """

    index: int
    sampled: int
    prompt: int
    targets: Int32Array


class Logprobs(NamedTuple, Generic[Array]):
    """Log-probabilities of n tokens, computed from the model's logits before any edit.

    chosen   float32 [n]; the log-probability of each token.
    top_ids  int32 [n, K]; ids of the most likely tokens at the same positions, most likely first.
    top      float32 [n, K]; the log-probabilities of top_ids.
    """

    chosen: Array
    top_ids: Array
    top: Array


HostLogprobs = Logprobs[NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One forward step, complete and immutable: first the decode requests, then the prefill chunks.

    step_id       counts up by one with each launched step, the same on all ranks.
    num_decode    number of decode requests. They come first. The engine reads their input tokens
                  from its token pool, at (row, start) to (row, start + length - 1). The host need
                  not know these tokens yet.
    drafting      True in every step of a scheduler that plans drafts. The engine then keeps the
                  number of cached tokens of each row on the device, and finds a draft for each
                  decode request.
    rows          int32 [B], distinct; each request's row in the page table and the token pool.
    start         int32 [B]; number of tokens in the KV cache before the step. This number is also
                  the position of the first token that the request forwards. For a decode request of
                  a step with `drafting`, start is an upper bound, which is exact if the step in
                  flight accepts all its drafts. The engine reads the exact number on the device.
    lengths       int32 [B]; tokens forwarded, at least 1. T = lengths.sum(). A decode request with
                  a length above 1 forwards draft tokens after its last token. Such a request has
                  no log-probabilities, and its logits are edited by masks of its Constraint at
                  most. The engine forwards `width` tokens of every decode request, and drops the
                  results of those past its length.
    samples       bool [B]; the request gets tokens from this step. False for a chunk that does not
                  reach the end of its prompt.
    chunk_ids     int32; token ids of the prefill chunks, concatenated. Id ~i, which is negative,
                  stands for the image token whose features are in row i of the image buffer.
    page_updates  changes of the page table. The engine applies them before the forward.
    sampling      the values of sampling columns (core.sampling), [B], by name. A column that is
                  missing has its neutral value for all requests.
    logit_edits   the requests with samples True and edited logits.
    logprobs      the requests that ask for log-probabilities.
    histories     the engine writes them to its token pool before the step, because drafts are found
                  there. Empty without `drafting`.
    states        copies between the states of rows and pages. None if there are none, so always
                  for a model without recurrent states.
    next_drafts   drafts that the draft head makes for each decode request after this step, for the
                  next one; 0 without a draft head.
    made          int32 [num_decode]; drafts that the draft head has made for each decode request
                  before this step. None without `drafting`. The engine counts them on the device.
    images        the images that the engine encodes before the layers, whole or in part, in this
                  order.
    rope          None if no request of the step has images, or if their positions have one axis.
    spans         the images in the chunks whose tokens attend to each other (ImageLimits.mutual).
    """

    step_id: int
    num_decode: int
    rows: Int32Array
    start: Int32Array
    lengths: Int32Array
    samples: NDArray[np.bool_]
    chunk_ids: Int32Array
    page_updates: PageUpdates
    sampling: SamplingArrays
    logit_edits: tuple[EditedReq, ...] = ()
    logprobs: tuple[LogprobsRequest, ...] = ()
    drafting: bool = False
    histories: tuple[History, ...] = ()
    states: StateCopies | None = None
    next_drafts: int = 0
    made: Int32Array | None = None
    images: tuple[EncodeImage, ...] = ()
    rope: RopePositions | None = None
    spans: tuple[ImageSpan, ...] = ()

    @property
    def width(self) -> int:
        """The smallest of DRAFT_WIDTHS that is no smaller than the length of any decode request."""
        longest = self.lengths[: self.num_decode].max(initial=1)
        return next(width for width in DRAFT_WIDTHS if width >= longest)

    def work(self) -> StepWork:
        """Return the work without images. A request that may have drafts counts as `start`."""
        first = self.num_decode
        chunks = zip(self.start[first:].tolist(), self.lengths[first:].tolist(), strict=True)
        pairs = sum(length * (start + length // 2) for start, length in chunks)
        tokens, keys = int(self.lengths.sum()), int(self.start[:first].sum())
        return StepWork(tokens, keys, pairs, first, self.next_drafts)

    def predict_s(self, cost: StepCost) -> float:
        """Return the predicted seconds of the step, with those of its images."""
        return cost.predict_s(self.work()) + sum(image.seconds for image in self.images)

    def plan_hash(self) -> int:
        """Return a checksum of requests, lengths and pages: equal on all tensor-parallel ranks."""
        updates = self.page_updates
        arrays = [self.rows, self.start, self.lengths, updates.cols, updates.ids]
        arrays += self.states or ()
        arrays += [np.array((*image.grid, image.first, image.end)) for image in self.images]
        arrays += [image.rows for image in self.images]
        data = b"".join(array.tobytes() for array in arrays) + bytes([self.next_drafts])
        return zlib.crc32(data, self.step_id)


class StepResult(NamedTuple):
    """The result of one step, in the order of the batch.

    tokens           int32 [B, W]; the tokens that the step added to each request. W is 1 unless
                     decode requests forward drafts. The first token of each row follows the last
                     token that the previous steps gave to the request.
    counts           int32 [B]; number of valid tokens in each row: 0 where batch.samples is
                     False, 1 for a chunk, 1 to its length for a decode request.
    finite           bool [B]; False when a request samples and its logits hold NaN or infinity.
    logprobs         log-probabilities of the first token of each request, B rows; None if no
                     request asks for them.
    prompt_logprobs  log-probabilities of the prompt tokens of a chunk, by the index of its request
                     in the batch. Requests that do not ask for them have no entry.
    by_graph         whether a CUDA graph ran the step.
    ended_in_launch  the step was complete when `launch` returned, as on a CPU.
    late             the step was complete before the call of `wait`.
    drafted, agreed  int32 [B]; for each decode request the number of draft tokens that the engine
                     found, and how many of them, counted from the first, equal the sampled tokens.
                     One draft token more is compared than the request forwarded. None without
                     batch.drafting.
    predicted        bool [B]; the draft tokens come from the client's prediction. None without
                     batch.drafting.
    """

    tokens: Int32Array
    counts: Int32Array
    finite: NDArray[np.bool_]
    logprobs: HostLogprobs | None = None
    prompt_logprobs: Mapping[int, HostLogprobs] | None = None
    by_graph: bool = False
    ended_in_launch: bool = False
    late: bool = False
    drafted: Int32Array | None = None
    agreed: Int32Array | None = None
    predicted: NDArray[np.bool_] | None = None


class DraftCounts(NamedTuple):
    """The numbers of drafts of a step.

    forwarded  draft tokens that the step forwards of each request.
    made       drafts that the draft head makes after the step, which the step after it can forward.
               0 for an engine without a draft head.
    """

    forwarded: int
    made: int


class DecodeLoad(NamedTuple):
    """The decode requests of the next step, as DraftLengths needs them.

    rows      int32, the rows of the decode requests that may have drafts, at least one.
    num_reqs  the number of all decode requests.
    keys      sum of the lengths of their contexts.
    limit     the largest number of drafts that a step may have. The engine forwards 1 + this many
              tokens of a request, rounded up to one of DRAFT_WIDTHS.
    cost      predicts step times. None: the times are unknown, or prompts wait or are computed.
    made      the most drafts that the draft head has made for one of `rows`.
    """

    rows: Int32Array
    num_reqs: int
    keys: int
    limit: int
    cost: StepCost | None
    made: int


class DraftLengths:
    """Chooses how many draft tokens a step forwards. Each rank has one; all make equal choices.

    The methods of this class choose none.
    """

    def choose(self, step: DecodeLoad) -> DraftCounts:
        """Return the numbers of drafts of each request in step.rows for this step."""
        return DraftCounts(0, 0)

    def open(self, row: int) -> None:
        """Forget the measurements of `row`, because it belongs to another request now."""

    def record(
        self, rows: Int32Array, drafted: Int32Array, agreed: Int32Array, made: Int32Array
    ) -> None:
        """Take the measured acceptance of decode requests, as in StepResult and Batch.made."""


class PendingStep(Protocol):
    """A launched step. The caller keeps it until it is complete: kernels use its host memory."""

    def wait(self) -> StepResult:
        """Block until the step is complete and return its result. The scheduler calls this once."""

    def done(self) -> bool:
        """Return True if the step is complete, so that wait returns at once."""


class WindowLayers(NamedTuple):
    """The layers of a model that attend to the last `tokens` tokens only, and their KV pool."""

    tokens: int
    num_pages: int

    def span(self, page_size: int) -> int:
        """The pages before the page of a token that its window can reach."""
        return -(-(self.tokens - 1) // page_size)

    def reserve(self, page_size: int, largest_span: int = 1) -> int:
        """The pages that a request needs to continue: its window, one more, and one in quarantine.

        largest_span: as in Rows. See kvcache.window.
        """
        return self.span(page_size) + 2 - (1 - largest_span) // page_size


class EngineLike(Protocol):
    """The part of an engine that the scheduler uses. Steps run in the order of their launch.

    window: None if the model has no window layers.
    snapshot_pages: pages of the KV pool that hold the recurrent state of one row; 0 if the model
    has no layers with such a state. The state of a row holds a whole number of pages of tokens:
    page_floor(s) tokens after a decode step that starts at token s, page_floor(e - 1) tokens after
    a chunk that ends at token e, where page_floor(n) = n - n % page_size. The engine does not read
    the state of a row that holds fewer tokens than a page, so a new row needs no copy.
    copier: copies KV pages to host memory; None if the engine has no host tier.
    images: None if the engine takes no images.
    """

    num_pages: int
    page_size: int
    max_running_reqs: int
    max_seq_len: int
    window: WindowLayers | None
    snapshot_pages: int
    copier: PageCopier | None
    images: ImageLimits | None

    def launch(self, batch: Batch) -> PendingStep:
        """Start the step without waiting. The caller must not change the batch's arrays later."""
