"""What a scheduler hands to an engine for one step, and what it gets back. No torch in here.

Shape letters, used everywhere: B reqs in the step, T tokens in the step, P pages, S page_size,
U page-table updates, Hq / Hkv local query / KV heads, D head_dim, V logit width, L layers.
"""

import zlib
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from minisgl.core.extras import Int32Array, StepExtras, StepLogprobs


class SamplingArrays(NamedTuple):
    """Sampling parameters of the B reqs of a step, one entry each.

    temperature float32 (0 greedy), top_k int32 (0 = all), top_p and min_p float32, seed int64.
    """

    temperature: NDArray[np.float32]
    top_k: Int32Array
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seed: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One forward step, complete and immutable: first the decode reqs, then the prefill chunks.

    step_id     counts up by one with each launched step, the same on all ranks.
    num_decode  the first num_decode reqs forward one token each, which the engine reads from its
                token pool at (row, start): the host need not know it yet.
    rows        int32 [B], distinct; each req's line in page table and token pool.
    start       int32 [B]; KV present before the step = position of the first token forwarded.
    lengths     int32 [B]; tokens forwarded, 1 for decode reqs. T = lengths.sum().
    samples     bool [B]; the token after position start + length - 1 is sampled and written to
                the token pool at (row, start + length). False for a chunk that leaves prompt over.
    chunk_ids   int32 [T - num_decode]; ids of the prefill chunks, one after the other.
    page_rows, page_cols, page_ids
                int32 [U]; page_table[page_rows, page_cols] = page_ids, applied before the forward.
    extras      None when every req only wants its next token.
    """

    step_id: int
    num_decode: int
    rows: Int32Array
    start: Int32Array
    lengths: Int32Array
    samples: NDArray[np.bool_]
    chunk_ids: Int32Array
    page_rows: Int32Array
    page_cols: Int32Array
    page_ids: Int32Array
    sampling: SamplingArrays
    extras: StepExtras | None = None

    @property
    def num_reqs(self) -> int:
        """B."""
        return len(self.rows)

    def plan_hash(self) -> int:
        """A checksum of who runs where with which pages: equal on all tensor-parallel ranks."""
        arrays = (self.rows, self.start, self.lengths, self.page_cols, self.page_ids)
        return zlib.crc32(b"".join(array.tobytes() for array in arrays), self.step_id)

    @property
    def num_prefill_tokens(self) -> int:
        """T - num_decode."""
        return len(self.chunk_ids)


class StepResult(NamedTuple):
    """tokens int32 [B], meaningful where batch.samples; finite bool [B], False for NaN or inf;
    logprobs where batch.extras asks for them; by_graph: a CUDA graph ran the step."""

    tokens: Int32Array
    finite: NDArray[np.bool_]
    logprobs: StepLogprobs | None = None
    by_graph: bool = False


class PendingStep(Protocol):
    """A launched step whose result has not been read."""

    def wait(self) -> StepResult:
        """Block until the step has completed on the device. Called exactly once."""

    def done(self) -> bool:
        """Whether wait would not block."""


class EngineLike(Protocol):
    """What the scheduler needs of an engine. Steps run in the order in which they are launched."""

    num_pages: int
    page_size: int
    max_running_reqs: int
    max_seq_len: int

    def launch(self, batch: Batch) -> PendingStep:
        """Start the step without waiting; the batch's arrays stay untouched until it is done."""
