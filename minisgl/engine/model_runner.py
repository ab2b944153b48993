"""The model with its device memory: packs a step, runs its forward, and holds its result."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.attention.base import AttentionBackend, StepAttention
from minisgl.core import Batch, Column, Int32Array, StepResult
from minisgl.engine.logprobs import PendingLogprobs
from minisgl.kernel import StepLayout, StepViews, stage_tokens
from minisgl.kvcache.pool import KVPool
from minisgl.layers.mixer import ForwardContext
from minisgl.models.decoder import Attended, CausalLM


@dataclass(frozen=True, slots=True, eq=False)
class ModelRunner:
    """The tensors that live on the device between steps, and the forward over them.

    Every method can run eagerly or during the capture of a CUDA graph, because no method waits for
    the device or reads from it.

    columns     sampling columns of the packed buffer.
    pools       the KV pools of ModelSpec.pools.
    page_table  int32 [pools * (max_running_reqs + 1), max_pages]; for each pool, the page ids of
                each row. The last row is for padding and points to the dummy page.
    token_pool  int32 [max_running_reqs + 1, max_seq_len + 1]; the entry at (row, position) is the
                id of the token at that position, after the sampler has written it. The decode
                requests of the next step read their ids here, so that the host need not know them.
    cached      int32 [max_running_reqs + 1]; the tokens of each row in the KV cache. None for an
                engine without drafts, because the host knows them. With drafts, rows of page_table
                and token_pool have room for MAX_DRAFTS positions after max_seq_len.
    tails       int32 [max_running_reqs + 1]; the first position of the prediction at the end of
                each row of token_pool, or the length of the row. None for an engine without drafts.
    replay      None, except in benchmarks and tests: int32, in the shape of token_pool. A number
                that is not negative takes the place of the token that the sampler draws for this
                row and position. A benchmark with random weights sets the acceptance of drafts by
                it.
    """

    model: CausalLM
    pools: tuple[KVPool, ...]
    attention: AttentionBackend
    columns: tuple[Column, ...]
    ropes: tuple[Tensor, ...]
    query_scale: Tensor | None
    page_table: Tensor
    token_pool: Tensor
    cached: Tensor | None = None
    tails: Tensor | None = None
    replay: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.pools[0].device

    @property
    def page_tables(self) -> tuple[Tensor, ...]:
        """The page table of each pool: views, int32 [max_running_reqs + 1, max_pages]."""
        return self.page_table.chunk(len(self.pools))

    @property
    def dummy_row(self) -> int:
        return self.page_table.shape[0] // len(self.pools) - 1

    @property
    def padding(self) -> list[int]:
        """The id, the position and the slots of a padding token."""
        return [0, 0, *(pool.dummy_slot for pool in self.pools)]

    def stage(self, views: StepViews[Tensor], num_decode_tokens: int, tokens: Tensor) -> None:
        """Fill `tokens` with the ids, positions and KV slots of a step's tokens.

        tokens: int32 [2 + pools, T]; the last rows are the slots in each pool.
        """
        ids, positions, *slots = tokens.unbind(0)
        for pool, page_table, places in zip(self.pools, self.page_tables, slots, strict=True):
            stage_tokens(
                views.rows,
                views.start,
                views.first,
                views.chunk_ids,
                num_decode_tokens,
                page_table,
                self.token_pool,
                pool.page_size,
                ids,
                positions,
                places,
            )

    def run(
        self, tokens: Tensor, attention: StepAttention, most_layers: int | None = None
    ) -> Attended:
        """Run the model over the tokens that `stage` has written, up to the last attention.

        Stores the keys and values of all T tokens. Returns the output of the last attention.
        most_layers: run at most this many of the layers before the last one, only to load kernels
        (rehearsal.layers_to_rehearse). The output is then not that of the model. None: all layers.
        """
        ids, positions, *slots = tokens.unbind(0)
        scale = None if self.query_scale is None else self.query_scale[positions]
        context = ForwardContext(positions, slots, self.ropes, self.pools, attention, scale)
        return self.model.model.forward_to_last_attention(ids, context, most_layers)


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """A packed batch, before its copy to the device. It has its own order of the requests.

    batch           the packed batch.
    order           intp [B]; the request at position i of the buffer has index order[i] in the
                    batch.
    start, lengths  int32 [N], in the order of the buffer. N is B plus padding. `lengths` are the
                    tokens that the engine forwards: `width` for every decode request.
    num_decode, width
                    as in the batch; num_decode includes padding.
    layout, packed  the packed buffer: int32 on the host, pinned for a GPU.
    """

    batch: Batch
    order: NDArray[np.intp]
    start: Int32Array
    lengths: Int32Array
    num_decode: int
    width: int
    layout: StepLayout
    packed: Tensor

    @property
    def places(self) -> NDArray[np.intp]:
        """Return intp [B]: the position in the buffer of each request of the batch."""
        return np.argsort(self.order)

    @property
    def logit_rows(self) -> NDArray[np.intp]:
        """Return intp [B]: the row of the first logits of each request of the batch."""
        places = self.places
        first: NDArray[np.intp] = places + np.minimum(places, self.num_decode) * (self.width - 1)
        return first


def pack(batch: Batch, size: int, runner: ModelRunner) -> StepInputs:
    """Write the batch to one buffer for `runner`, padded to `size` requests.

    Decode requests are ordered by decreasing context length. The thread blocks of attention that
    start last then have little work, and all multiprocessors end at about the same time.
    """
    reqs, num_decode = batch.num_reqs, batch.num_decode
    order = np.arange(reqs)
    order[:num_decode] = np.argsort(-batch.start[:num_decode], kind="stable")
    layout = StepLayout(size, len(batch.page_updates.ids), len(batch.chunk_ids), runner.columns)
    # A copy to a GPU is asynchronous only from pinned memory.
    packed = torch.empty(layout.size, dtype=torch.int32, pin_memory=runner.device.type == "cuda")
    host = layout.host_views(packed.numpy())
    host.rows[:reqs] = batch.rows[order]
    host.start[:reqs] = batch.start[order]
    host.lengths[:reqs] = batch.lengths[order]
    host.samples[:reqs] = batch.samples[order]
    for column in runner.columns:
        values = batch.sampling.get(column.name)
        host.sampling[column.name][:reqs] = column.neutral if values is None else values[order]
    # Padding is at the end, so it is part of the decode requests of a step without chunks.
    all_decode = size if num_decode == reqs else num_decode
    lengths = pad(host, reqs, runner, all_decode, batch.width)
    host.page_rows[:], host.page_cols[:], host.page_ids[:] = batch.page_updates
    host.chunk_ids[:] = batch.chunk_ids
    return StepInputs(batch, order, host.start, lengths, all_decode, batch.width, layout, packed)


def pad(
    host: StepViews[NDArray[Any]], begin: int, runner: ModelRunner, num_decode: int, width: int
) -> Int32Array:
    """Fill the rows from `begin` on with padding requests, and compute host.first.

    A padding request forwards tokens to the dummy page and writes no sampled token. The first
    num_decode rows forward `width` tokens each. Returns int32 [N]: the forwarded tokens of a row.
    """
    host.rows[begin:] = runner.dummy_row
    host.start[begin:] = 0
    host.lengths[begin:] = 1
    host.samples[begin:] = 0
    for column in runner.columns:
        host.sampling[column.name][begin:] = column.neutral
    lengths = host.lengths.copy()
    lengths[:num_decode] = width
    host.first[0] = 0
    np.cumsum(lengths[:-1], out=host.first[1:])
    return lengths


class LaunchedStep:
    """A step in progress on the device; implements core.PendingStep.

    It keeps references to the batch and to the packed buffer until the step is done. Tensors on the
    device need no such reference, because torch reuses their memory in the order of the stream.
    """

    def __init__(
        self,
        inputs: StepInputs,
        next_tokens: Tensor | None,
        logprobs: PendingLogprobs | None = None,
        by_graph: bool = False,
    ) -> None:
        """Queue the copy of the result to the host on the current stream.

        next_tokens: int32 [2, N] as sampler.sample_tokens returns it, or [6 + W, N] as
        DraftStep.accept returns it for a step with drafts. None when no request samples.
        """
        self._inputs = inputs
        self._logprobs = logprobs
        self._by_graph = by_graph
        self._host = None if next_tokens is None else next_tokens.to("cpu", non_blocking=True)
        self._done: torch.cuda.Event | None = None
        if inputs.packed.is_pinned():
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def done(self) -> bool:
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def wait(self) -> StepResult:
        """Block until the step is done. Requests that do not sample get token 0, finite=True."""
        if self._done is not None:
            self._done.synchronize()
        inputs, batch = self._inputs, self._inputs.batch
        samples = batch.samples
        result = np.zeros((result_rows(inputs.width), len(samples)), dtype=np.int32)
        if self._host is not None:
            result[: len(self._host), inputs.order] = self._host.numpy()[:, : len(samples)]
        finite = (result[1] != 0) | ~samples
        tokens, counts = result[:1], samples.astype(np.int32)
        drafted = agreed = predicted = None
        if batch.drafting:
            counts, agreed, drafted = result[2:5]
            predicted, tokens = result[5] != 0, result[6:]
        tokens = np.where(samples, tokens, 0).T
        logprobs = prompts = None
        if self._logprobs is not None:
            logprobs, prompts = self._logprobs.read(inputs.places)
        drafts = drafted, agreed, predicted
        return StepResult(tokens, counts, finite, logprobs, prompts, self._by_graph, *drafts)


def result_rows(width: int) -> int:
    """Return the number of rows of the tensor that DraftStep.accept returns."""
    return 6 + width
