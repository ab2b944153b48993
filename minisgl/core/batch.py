"""The contract between scheduler and engine: one forward step, and its result.

The scheduler builds a `Batch`, `EngineLike.launch` starts it, and `PendingStep.wait` returns a
`StepResult`. All arrays here are numpy arrays on the host; this module does not import torch.

Shape letters, used in the whole package: B requests in the step, T tokens in the step, P pages,
S page_size, U page-table updates, Hq / Hkv local query / KV heads, D head_dim, V logit width,
L layers, N rows of the device's tensors (B and padding).
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from minisgl.core.sampling import SamplingArrays

Int32Array = NDArray[np.int32]
Array = TypeVar("Array")


class PageUpdates(NamedTuple):
    """Changes of the page table: page_table[rows, cols] = ids. Each array is int32 [U]."""

    rows: Int32Array
    cols: Int32Array
    ids: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class EditedReq:
    """A request of a step whose next token is sampled from edited logits.

    index       its position in the batch.
    position    position of the token that this step samples.
    prompt_len  position of its first output token.
    history     int32 [position], its tokens so far, on the first step that samples for it since it
                got its row; None on later steps. Tokens that came from the prefix cache do not pass
                through the engine, so a processor that counts tokens needs this array.
    states      one entry for each logits processor, as LogitsProcessor.open returned it.
    """

    index: int
    position: int
    prompt_len: int
    history: Int32Array | None
    states: tuple[Any, ...]


class LogprobsRequest(NamedTuple):
    """Which log-probabilities a step reports beside its tokens.

    sampled         int32 [B]; number of most likely tokens to report with the sampled token,
                    -1: report nothing.
    prompt          int32 [B]; the same for each prompt token of a chunk, -1: report nothing.
    prompt_targets  int32 [sum of the lengths of the chunks with prompt >= 0]; the prompt token that
                    follows each position, -1 behind the end of the prompt.
    """

    sampled: Int32Array
    prompt: Int32Array
    prompt_targets: Int32Array


class Logprobs(NamedTuple, Generic[Array]):
    """Log-probabilities of n tokens, computed from the logits as the model returns them.

    chosen   float32 [n], of the tokens themselves.
    top_ids  int32 [n, K], the most likely tokens at the same positions, most likely first.
    top      float32 [n, K], of these.
    """

    chosen: Array
    top_ids: Array
    top: Array


HostLogprobs = Logprobs[NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One forward step, complete and immutable: first the decode requests, then prefill chunks.

    step_id       counts up by one with each launched step, the same on all ranks.
    num_decode    the first num_decode requests decode. The engine reads the tokens that they
                  forward from its token pool at (row, start) to (row, start + length - 1), so the
                  host need not know them yet.
    rows          int32 [B], distinct; each request's row in the page table and the token pool.
    start         int32 [B]; tokens in the KV cache before the step, which is also the position of
                  the first token that the request forwards.
    lengths       int32 [B]; tokens forwarded, at least 1. T = lengths.sum(). A decode request with
                  a length above 1 forwards draft tokens behind its last token. The next step must
                  not contain it before this step's result is read, and it can have neither edited
                  logits nor log-probabilities.
    samples       bool [B]; the request gets tokens from this step. False for a chunk that does not
                  reach the end of its prompt.
    chunk_ids     int32 [T - num_decode_tokens]; token ids of the prefill chunks, concatenated.
    page_updates  applied before the forward.
    sampling      the values of sampling columns (core.sampling), [B], by name. A column that is
                  missing has its neutral value for all requests.
    logit_edits   the sampling requests with edited logits; None when there are none.
    logprobs      None when no request asks for log-probabilities.
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
    logit_edits: tuple[EditedReq, ...] | None = None
    logprobs: LogprobsRequest | None = None

    @property
    def num_reqs(self) -> int:
        """B."""
        return len(self.rows)

    @property
    def num_decode_tokens(self) -> int:
        """Tokens that the decode requests forward; num_decode when none of them has drafts."""
        return int(self.lengths[: self.num_decode].sum())

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of the prefill chunks: T - num_decode_tokens."""
        return len(self.chunk_ids)

    def plan_hash(self) -> int:
        """Return a checksum of requests, lengths and pages: equal on all tensor-parallel ranks."""
        updates = self.page_updates
        arrays = (self.rows, self.start, self.lengths, updates.cols, updates.ids)
        return zlib.crc32(b"".join(array.tobytes() for array in arrays), self.step_id)


class StepResult(NamedTuple):
    """The result of one step, in the order of the batch.

    tokens           int32 [B, W]; the tokens that the step added to each request. W is 1 unless
                     decode requests forward drafts. The first token of a decode request stands at
                     position start + 1, that of a chunk at start + length.
    counts           int32 [B]; how many tokens of each row are valid: 0 where batch.samples is
                     False, 1 for a chunk, 1 to its length for a decode request.
    finite           bool [B]; False when the logits of a sampling request hold NaN or infinity.
    logprobs         of the first token of each request, [B] rows, where batch.logprobs asks.
    prompt_logprobs  for each index in the batch that asks, those of its chunk's positions.
    by_graph         whether a CUDA graph ran the step.
    """

    tokens: Int32Array
    counts: Int32Array
    finite: NDArray[np.bool_]
    logprobs: HostLogprobs | None = None
    prompt_logprobs: Mapping[int, HostLogprobs] | None = None
    by_graph: bool = False


class PendingStep(Protocol):
    """A launched step whose result has not been read."""

    def wait(self) -> StepResult:
        """Block until the device has completed the step. The scheduler calls this exactly once."""

    def done(self) -> bool:
        """Return whether wait would not block."""


class EngineLike(Protocol):
    """The part of an engine that the scheduler uses. Steps run in the order of their launch."""

    num_pages: int
    page_size: int
    max_running_reqs: int
    max_seq_len: int

    def launch(self, batch: Batch) -> PendingStep:
        """Start the step without waiting. The caller does not change the batch's arrays."""
