"""Work without requests, which loads all kernels before the engine serves.

Steps            run on the dummy page of each KVPool, the last one. The contexts that they read are
                 spread over the whole KV pool, like the contexts of real requests.
Layers           run before the capture of a graph, as many as contain every kind of layer. Most
                 layers of a model launch the same kernels with the same specialisation: they are of
                 the same kind. In a model whose layers are equal, two layers are enough.
"""

import itertools
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn

from minisgl.core import SamplingParams
from minisgl.core.batch import Batch, EngineLike, LogprobsRequest, PageUpdates, StateCopies
from minisgl.core.columns import sampling_arrays
from minisgl.core.config import DRAFT_WIDTHS, MAX_DRAFT_TOKENS
from minisgl.core.step_cost import TimedStep
from minisgl.engine.images import with_largest_image
from minisgl.engine.model_runner import ModelRunner
from minisgl.models.layer import DecoderLayer

GREEDY = SamplingParams(temperature=0.0, seed=0)
FILTERED = SamplingParams(temperature=1.0, top_k=2, seed=0)
_KINDS = (GREEDY, SamplingParams(temperature=1.0, seed=0), FILTERED)

_ALIGNMENT = 16  # kernels are specialised for addresses that are multiples of this
_PACKAGES = ("minisgl", "torch")
# The attributes that nn.Module itself sets. None of them selects a kernel of minisgl.
_BASE_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


class StepShape(NamedTuple):
    """Size of a step.

    num_decode  decode requests, each with `context` tokens in the KV cache.
    chunk       prompt tokens of the step, in several prompts if they exceed the context length.
    context     cached tokens of each request, before the tokens that the step forwards.
    width       tokens that each decode request forwards.
    """

    num_decode: int
    chunk: int
    context: int
    width: int = 1


def warm_up(engine: EngineLike, widths: Sequence[int] = DRAFT_WIDTHS[:1]) -> None:
    """Run a prefill step, and a decode and a mixed step of each width, with all kinds of sampling.

    An engine with one row has no mixed steps. widths: the numbers of tokens that decode requests of
    this engine may forward.
    """
    shapes, mixed_decodes = [StepShape(0, 4, 0)], min(engine.max_running_reqs - 1, 2)
    for width in widths:
        shapes.append(StepShape(1, 0, 4, width))
        if mixed_decodes:
            shapes.append(StepShape(mixed_decodes, 3, 4, width))
    for shape in shapes:
        for params, logprobs in itertools.product(_KINDS, (False, True)):
            _run(engine, warmup_batch(engine, shape, params, logprobs=logprobs))
    if engine.snapshot_pages:
        _copy_states(engine)


def _copy_states(engine: EngineLike) -> None:
    """Save the recurrent states of a row to the dummy page, and load others from there."""
    batch, row = warmup_batch(engine, StepShape(0, 4, 0)), np.zeros(1, dtype=np.int32)
    assert batch is not None, "the engine must have room for one request; this is a bug"
    pages = np.full((1, engine.snapshot_pages), engine.num_pages, dtype=np.int32)
    _run(engine, replace(batch, states=StateCopies(row, pages, row, pages)))


def timed_shapes(graph_reqs: int, chunks: Sequence[int], max_seq_len: int) -> list[StepShape]:
    """Return the steps to time, in rising order of tokens.

    They are a decode step of one request, that of the largest CUDA graph (graph_reqs requests, 1
    without graphs), and the chunks that have more tokens than these. A shorter chunk is no point of
    its own, because a number of tokens has one price: up to graph_reqs that of a decode step.
    """
    shapes = [StepShape(reqs, 0, 1) for reqs in (1, graph_reqs)]
    lengths = [min(chunk, max_seq_len) for chunk in chunks]
    shapes += [StepShape(0, length, 0) for length in lengths if length > graph_reqs]
    return list(dict.fromkeys(shapes))


def time_steps(engine: EngineLike, shapes: Sequence[StepShape]) -> list[TimedStep]:
    """Time steps of these shapes.

    Each step runs three times, and the shortest time counts, because other work on the machine only
    makes a step longer. Before them, a chunk with a long context runs. It loads kernels that a
    short context does not need.
    """
    far = min(engine.max_seq_len * 3 // 4, 8192)
    longest = max(shape.chunk for shape in shapes) or 1
    _run(engine, warmup_batch(engine, StepShape(0, min(longest, engine.max_seq_len - far), far)))
    timed = []
    for shape in shapes:
        batch = warmup_batch(engine, shape)
        assert batch is not None, "the engine must have room for one request; this is a bug"
        seconds = []
        for _ in range(3):
            began_s = time.perf_counter()
            engine.launch(batch).wait()
            seconds.append(time.perf_counter() - began_s)
        timed.append(TimedStep(int(batch.lengths.sum()), min(seconds)))
    return timed


def run_every_size(engine: EngineLike, max_chunk_tokens: int) -> None:
    """Run decode steps of every number of requests, and chunks of many lengths."""
    shapes = [StepShape(reqs, 0, 4) for reqs in range(1, engine.max_running_reqs + 1)]
    for size in (2**power for power in range(max_chunk_tokens.bit_length())):
        shapes += [StepShape(0, size, 0), StepShape(0, size + 1, 0), StepShape(1, size, 4)]
    for shape in shapes:
        if shape.chunk <= max_chunk_tokens:
            _run(engine, warmup_batch(engine, shape, FILTERED))


def run_largest(engine: EngineLike, max_chunk_tokens: int, drafting: bool = False) -> None:
    """Run the step that takes the most memory: all rows, the longest chunk, random sampling.

    drafting: also run the largest step with drafts. An engine that takes images runs each step
    twice, and encodes a half of the largest image in each.
    """
    chunks = -(-max_chunk_tokens // engine.max_seq_len)
    num_decode = max(engine.max_running_reqs - chunks, 0)
    capacity = (engine.max_running_reqs - num_decode) * engine.max_seq_len
    shapes = [StepShape(num_decode, min(max_chunk_tokens, capacity), 0)]
    if drafting:
        most = min(num_decode, MAX_DRAFT_TOKENS // DRAFT_WIDTHS[-1])
        shapes.append(shapes[0]._replace(num_decode=most, width=DRAFT_WIDTHS[-1]))
    for shape in shapes:
        batch = warmup_batch(engine, shape, FILTERED)
        assert batch is not None, "the engine must have room for the largest step; this is a bug"
        for each in with_largest_image(batch, engine.images):
            _run(engine, each)


def _run(engine: EngineLike, batch: Batch | None) -> None:
    if batch is not None:
        engine.launch(batch).wait()


def warmup_batch(
    engine: EngineLike,
    shape: StepShape,
    params: SamplingParams = GREEDY,
    *,
    logprobs: bool = False,
) -> Batch | None:
    """Return a batch of that shape; None if the engine has too few rows or too short a context.

    logprobs: run the code path of requests with edited logits or log-probabilities. The step
    reports no log-probabilities.
    """
    longest = max(engine.max_seq_len - shape.context, 1)
    num_chunks = -(-shape.chunk // longest)
    num_reqs = shape.num_decode + num_chunks
    if num_reqs > engine.max_running_reqs or shape.context >= engine.max_seq_len:
        return None
    lengths = np.full(num_reqs, shape.width, dtype=np.int32)
    lengths[shape.num_decode :] = longest
    if num_chunks:
        lengths[-1] = shape.chunk - (num_chunks - 1) * longest
    pages = -(-(shape.context + int(lengths.max())) // engine.page_size)
    read_only = shape.context // engine.page_size
    window = [] if engine.window is None else [engine.window.num_pages]
    num_pages = np.array([engine.num_pages, *window], dtype=np.int32)[:, None, None]
    table, req, col = np.indices((len(num_pages), num_reqs, pages), dtype=np.int32)
    ids = np.where(col < read_only, (req * read_only + col) % num_pages, num_pages)
    table_rows = table * (engine.max_running_reqs + 1) + req
    updates = PageUpdates(table_rows.ravel(), col.ravel(), ids.ravel())
    return Batch(
        step_id=0,
        num_decode=shape.num_decode,
        rows=np.arange(num_reqs, dtype=np.int32),
        start=np.full(num_reqs, shape.context, dtype=np.int32),
        lengths=lengths,
        samples=np.ones(num_reqs, dtype=np.bool_),
        chunk_ids=np.zeros(shape.chunk, dtype=np.int32),
        page_updates=updates,
        sampling=sampling_arrays([params] * num_reqs),
        logprobs=(LogprobsRequest(0, -1, -1, lengths[:0]),) if logprobs else (),
        next_drafts=shape.width - 1,
    )


def layers_to_rehearse(runner: ModelRunner) -> int:
    """Return how many of the first layers launch all kernels of the model.

    The kernels of a layer also depend on the layer before it, which may leave a sum to this layer.
    The first layers therefore contain each pair of kinds of neighbouring layers.

    With tensor parallelism, the number is that of all layers. Each rank computes the number for
    itself, and ranks with different numbers would make different collective calls. The number is
    also that of all layers if a module of another package computes a part of a layer.
    """
    model, layers = runner.model, list(runner.model.model.layers)
    packages = {type(module).__module__.partition(".")[0] for module in model.modules()}
    if model.lm_head.comm.tp.size > 1 or not packages.issubset(_PACKAGES):
        return len(layers)
    kinds = [tuple(_kind(layer, runner)) for layer in layers]
    pairs = list(zip([None, *kinds], kinds, strict=False))
    return 1 + max(pairs.index(pair) for pair in pairs)


def _kind(layer: DecoderLayer, runner: ModelRunner) -> Iterator[Hashable]:
    """Yield the properties of a layer that select its kernels and their specialisation.

    These are the kind of the mixer, the MLP, the types and own settings of the modules, and the
    shapes, dtypes, strides and alignments of parameters, keys, values and scales.
    """
    yield from (layer.mixer.kind, layer.spec.mlps)
    for path, module in layer.named_modules():
        yield path, type(module)
        settings = vars(module)
        for setting in sorted(settings.keys() - _BASE_MODULE_ATTRIBUTES):
            value = settings[setting]
            if isinstance(value, bool | int | float | Enum):
                yield setting, value
            elif setting == "form":  # the format of quantised weights
                yield setting, str(value)
            elif value is None or isinstance(value, Tensor):
                yield setting, value is None
    for name, parameter in layer.named_parameters():
        yield name, *_form(parameter)
    for tensor in layer.mixer.state(runner.pools, runner.states.layers if runner.states else ()):
        yield None if tensor is None else tuple(_form(tensor))


def _form(tensor: Tensor) -> Iterator[Hashable]:
    yield from (tensor.shape, tensor.dtype, tensor.stride())
    yield tensor.data_ptr() % _ALIGNMENT
