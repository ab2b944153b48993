"""The memory of layers with recurrent states. state_copies.py copies it to KV pages and back."""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from minisgl.core import ConfigError, EngineConfig, OutOfMemory
from minisgl.distributed.comm import Communicator, TPInfo
from minisgl.engine.step_tensors import StepColumns
from minisgl.kernel.dispatch import begin_states
from minisgl.kernel.states import StateStep
from minisgl.kvcache.pool import KVSpec
from minisgl.layers.states import StateBuild, StatePart, StateSpec

logger = logging.getLogger(__name__)

# Tokens of a page of a model with recurrent states. A step moves a state by one page at most, so a
# page has at least as many tokens as a step with drafts (DRAFT_WIDTHS).
_STATE_PAGES = (16, 32, 64)
_WORD = 4  # bytes of an int32
_ALIGNMENT = 16  # bytes; the vectors that kernels load


class RowStates(NamedTuple):
    """The memory of all layers with states, of R rows.

    page_size   tokens between two boundaries.
    kept        int32 [R, W], for each row all that a copy of its states holds, layer after layer.
    layers      the memory of each layer, by StateSpec.layer. The parts in `kept` are views.
    boundaries  int32 [R], the boundary of each row (begin_states).
    requests    int32 [6, R], the columns of a StateStep at fixed addresses. The last of its R
                requests is padding. The graphs of steps with prompts read them.
    """

    page_size: int
    kept: Tensor
    layers: tuple[Any, ...]
    boundaries: Tensor
    requests: Tensor

    def padding(self, size: int) -> StateStep:
        """Return `requests` as a step, filled with `size` tokens of padding."""
        none = (self.boundaries[:0],) * 4
        begin_states(self.boundaries, *none, 0, self.page_size, 0, size, self.requests)
        return StateStep.of(self.requests, chunks=1)

    def begin(self, columns: StepColumns, count: int, size: int | None) -> StateStep:
        """Return the requests of a step, and move the boundaries of their rows.

        count, size: as ModelRunner.begin_states.
        """
        views, lengths = columns.views, columns.forwarded_lengths()
        fixed = size is not None
        out = self.requests if fixed else views.rows.new_empty((6, len(views.rows)))
        begin_states(
            self.boundaries,
            views.rows,
            views.start,
            lengths,
            views.first,
            columns.num_decode,
            self.page_size,
            count,
            count if size is None else size,
            out,
        )
        return StateStep.of(out, len(views.rows) - columns.num_decode, padded=fixed)


def check_page_size(page_size: int) -> None:
    """Raise ConfigError if layers with states do not run with pages of this size."""
    if page_size not in _STATE_PAGES:
        raise ConfigError(
            f"page_size {page_size} is not supported for a model with recurrent states, such as "
            f"gated delta nets; supported: {', '.join(map(str, _STATE_PAGES))}"
        )


def check_chunks(max_chunk_tokens: int, page_size: int) -> None:
    """Raise ConfigError if the chunks of prompts cannot end at pages."""
    if max_chunk_tokens < page_size:
        raise ConfigError(
            f"--max-prefill-length {max_chunk_tokens} is too small for a model with recurrent "
            f"states, whose chunks have at least one page of {page_size} tokens"
        )


def state_build(
    config: EngineConfig, dtype: torch.dtype, tp: TPInfo, device: torch.device, drafting: bool
) -> StateBuild:
    """Return the rows of layers with recurrent states: those of requests, and one for padding."""
    rows = config.max_running_reqs + 1
    return StateBuild(rows, config.page_size, drafting, tp, dtype, device)


def rows_that_fit(max_running_reqs: int, row_bytes: int, available: int) -> int:
    """Return the number of requests whose states fit, at most max_running_reqs.

    The states may take half of the memory that the weights leave; the KV pages get the rest.
    row_bytes: of the states of one row; 0 without states. available: bytes beside the weights.
    Raises OutOfMemory.
    """
    if not row_bytes:
        return max_running_reqs
    fitting = max(available, 0) // 2 // row_bytes - 1  # one row is for padding
    if fitting < 1:
        raise OutOfMemory(
            f"the recurrent states of a request take {row_bytes} bytes, and the states of one "
            f"request and of padding do not fit into half of the {available} bytes that are left; "
            "raise memory_ratio (on a CPU, raise cpu_kv_bytes) or use more GPUs"
        )
    return min(max_running_reqs, fitting)


def limit_rows(
    config: EngineConfig, row_bytes: int, available: int, comm: Communicator
) -> EngineConfig:
    """Return the config with max_running_reqs lowered to the requests whose states fit.

    The number is the same on every rank. row_bytes, available: as for rows_that_fit.
    Raises OutOfMemory.
    """
    asked = config.max_running_reqs
    rows = comm.agree_min(rows_that_fit(asked, row_bytes, available))
    if rows < asked:
        logger.info(
            "max_running_reqs lowered from %d to %d: the recurrent states of a request take %d "
            "bytes, and all of them at most half of the %d bytes beside the weights",
            asked,
            rows,
            row_bytes,
            available,
        )
    return msgspec.structs.replace(config, max_running_reqs=rows)


def allocate_states(specs: Sequence[StateSpec], build: StateBuild) -> RowStates | None:
    """Allocate the memory of all layers with states; None if there are none."""
    if not specs:
        return None
    parts = [spec.kept(build) for spec in specs]
    kept = torch.zeros(
        (build.rows, row_words(specs, build)), dtype=torch.int32, device=build.device
    )
    layers, first = [], 0
    for spec, of_layer in zip(specs, parts, strict=True):
        views = []
        for part in of_layer:
            size = part.num_bytes // _WORD
            view = kept[:, first : first + size].view(part.dtype)
            views.append(view.view(build.rows, *part.shape))
            first += _words(part)
        layers.append(spec.memory(views, build))
    boundaries = torch.zeros(build.rows, dtype=torch.int32, device=build.device)
    requests = torch.zeros((6, build.rows), dtype=torch.int32, device=build.device)
    return RowStates(build.page_size, kept, tuple(layers), boundaries, requests)


def _words(part: StatePart) -> int:
    """Return the words of a part in a row, so that each part is aligned."""
    return -(-part.num_bytes // _ALIGNMENT) * (_ALIGNMENT // _WORD)


def row_bytes(specs: Sequence[StateSpec], build: StateBuild) -> int:
    """Return the bytes of one row of all layers; 0 without layers with states."""
    states = allocate_states(specs, build._replace(rows=1, device=torch.device("meta")))
    if states is None:
        return 0
    return sum(part.nbytes for memory in states.layers for part in memory)


def row_words(specs: Sequence[StateSpec], build: StateBuild) -> int:
    """Return the words of RowStates.kept for each row."""
    return sum(_words(part) for spec in specs for part in spec.kept(build))


def snapshot_pages(words: int, kv: KVSpec, layers: int, page_size: int) -> int:
    """Return the pages of a KV pool that hold a copy of `words` words; 0 for no words.

    kv, layers: the keys and values of one layer for one token, and the number of layers.
    """
    if not words:  # a model with window layers only has no page to divide by
        return 0
    return -(-words * _WORD // (layers * page_size * kv.stored_bytes))
