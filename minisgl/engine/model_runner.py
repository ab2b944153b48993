"""`ModelRunner`: the model with its device memory, and its forward."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.attention.base import AttentionBackend, AttentionStep, StepAttention
from minisgl.core.batch import Int32Array, WindowLayers
from minisgl.engine.states import RowStates, snapshot_pages
from minisgl.engine.step_tensors import Packer, StepColumns
from minisgl.kernel.dispatch import stage_tokens
from minisgl.kernel.states import StateStep
from minisgl.kvcache.pool import KVPool
from minisgl.layers.images import ImageFeatures, MixedAngles
from minisgl.layers.mixer import ForwardContext
from minisgl.models.decoder import CausalLM
from minisgl.models.layer import Attended


class DraftTensors(NamedTuple):
    """The drafts of all rows, on the device. Each step reads those that it or an earlier one wrote.

    Each is int32 [max_running_reqs + 1].

    cached     the tokens of each row in the KV cache.
    found      the number of drafts of each request of a step, in its order; 0 for a chunk.
    predicted  1 for requests whose drafts come from the client's prediction, otherwise 0.
    """

    cached: Tensor
    found: Tensor
    predicted: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ModelRunner:
    """The tensors that live on the device between steps, and the forward over them.

    Every method can run eagerly or during the capture of a CUDA graph, because no method waits for
    the device or reads from it.

    packer      writes batches into buffers for this memory.
    max_seq_len
                the most tokens of a request, prompt and output.
    pools       the KV pools of ModelSpec.pools.
    page_table  int32 [pools * (max_running_reqs + 1), max_pages]; for each pool, the page ids of
                each row. The last row is for padding and points to the dummy page.
    token_pool  int32 [max_running_reqs + 1, max_seq_len + 1]; the entry at (row, position) is the
                id of the token at that position, after the sampler has written it. The decode
                requests of the next step read their ids here, so that the host need not know them.
    drafts      None for an engine without drafts. With drafts, rows of page_table and token_pool
                have room for MAX_DRAFTS positions after max_seq_len.
    states      the memory of layers with recurrent states; None for a model without them.
    angles      the angles of image tokens; None for a model without an image encoder.
    images      the buffer with the features of image tokens, as ImageFeatures.buffer; None for a
                model without an image encoder.
    """

    model: CausalLM
    pools: tuple[KVPool, ...]
    attention: AttentionBackend
    packer: Packer
    max_seq_len: int
    ropes: tuple[Tensor, ...]
    query_scale: Tensor | None
    page_table: Tensor
    token_pool: Tensor
    drafts: DraftTensors | None = None
    states: RowStates | None = None
    angles: MixedAngles | None = None
    images: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.pools[0].device

    @property
    def window(self) -> WindowLayers | None:
        """The window layers and their pool; None if the model has none."""
        tokens = self.model.config.window
        return None if tokens is None else WindowLayers(tokens, self.pools[-1].num_pages)

    @property
    def snapshot_pages(self) -> int:
        """As in core.EngineLike."""
        pool, words = self.pools[0], 0 if self.states is None else self.states.kept.shape[1]
        return snapshot_pages(words, pool.spec, len(pool.layers), pool.page_size)

    @property
    def page_tables(self) -> tuple[Tensor, ...]:
        """The page table of each pool: views, int32 [max_running_reqs + 1, max_pages]."""
        return self.page_table.chunk(len(self.pools))

    @property
    def has_deepstack(self) -> bool:
        """Whether layers add features of image tokens to the stream."""
        return any(layer.tap is not None for layer in self.model.config.layers)

    @property
    def padding(self) -> list[int]:
        """A padding token, as `stage` writes tokens."""
        turns = [] if self.angles is None else [0]
        return [0, 0, *(pool.dummy_slot for pool in self.pools), *turns]

    def attention_step(
        self, columns: StepColumns, start: Int32Array, lengths: Int32Array
    ) -> AttentionStep:
        """Return the metadata of a step. start, lengths: int32 [N] on the host."""
        views, on_device = columns.views, columns.forwarded_lengths()
        reqs, tables = (views.rows, views.start, on_device), self.page_tables
        windows = tables[1] if len(tables) > 1 else None
        step = AttentionStep(columns.num_decode, start, lengths, *reqs, tables[0], windows)
        return step if self.angles is None else step._replace(device_deltas=views.deltas)

    def stage(
        self, columns: StepColumns, chunk_ids: Tensor, tokens: Tensor, rope: Tensor | None = None
    ) -> None:
        """Fill `tokens` with the ids, positions and KV slots of a step's tokens.

        chunk_ids: int32, as in the batch. tokens: int32 [2 + pools, T]; the last rows are the slots
        in each pool. A model with `angles` has a further row: the turns of the tokens, which are
        rows of the rotary table. rope: as StepTensors.rope.
        """
        views, num_decode_tokens = columns.views, columns.num_decode * columns.width
        ids, positions, *slots = tokens.unbind(0)
        turned: tuple[Tensor, ...] = ()
        if self.angles is not None:
            turned = views.deltas, slots.pop()
        for pool, page_table, places in zip(self.pools, self.page_tables, slots, strict=True):
            stage_tokens(
                views.rows,
                views.start,
                views.first,
                chunk_ids,
                num_decode_tokens,
                page_table,
                self.token_pool,
                pool.page_size,
                ids,
                positions,
                places,
                *turned,
            )
        if self.angles is not None and rope is not None:
            (table,) = self.ropes
            self.angles.mix(table, rope, turned[1][num_decode_tokens:])

    def begin_states(
        self, columns: StepColumns, count: int, size: int | None = None
    ) -> StateStep | None:
        """Return the requests of a step for `run`, and move the boundaries of their states.

        Comes before `stage`: kernels of the layers read the requests early (overlap.py, I3).
        count: tokens of the requests. size: tokens of the forward, if it has fixed tensors
        (RowStates.requests). Returns None for a model without states.
        """
        return None if self.states is None else self.states.begin(columns, count, size)

    def run(
        self,
        tokens: Tensor,
        attention: StepAttention,
        most_layers: int | None = None,
        states: StateStep | None = None,
        *,
        has_images: bool = False,
    ) -> Attended:
        """Run the model over the tokens that `stage` has written, up to the last attention.

        Stores the keys and values of all T tokens. Returns the output of the last attention.
        states: from begin_states, once for each step. Needed if the model has layers with states.
        has_images: whether DeepStack runs. Needed if the step has image tokens.
        most_layers: run at most this many of the layers before the last one, only to load kernels
        (warmup.layers_to_rehearse). The output is then not that of the model. None: all layers.
        """
        context = self.context(tokens, attention, states)
        if has_images and self.images is not None:
            context = context._replace(images=ImageFeatures(tokens[0], self.images))
        return self.model.model.forward_to_last_attention(tokens[0], context, most_layers)

    def context(
        self, tokens: Tensor, attention: StepAttention, states: StateStep | None = None
    ) -> ForwardContext:
        """Return the inputs that all layers share. The arguments are those of `run`."""
        _, positions, *slots = tokens.unbind(0)
        if self.angles is not None:
            positions = slots.pop()
        scale = None if self.query_scale is None else self.query_scale[positions]
        layers = () if self.states is None else self.states.layers
        return ForwardContext(
            positions, slots, self.ropes, self.pools, attention, scale, layers, states
        )

    def clear_dummy(self) -> None:
        """Set the dummy page of each pool to zeros."""
        for pool in self.pools:
            pool.clear_dummy()
