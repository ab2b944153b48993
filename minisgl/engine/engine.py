"""One tensor-parallel worker: model, KV pool, page table, token pool and sampler.

It does what a Batch says and knows nothing of queues, prefixes or ownership.
"""

import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minisgl.attention import attention_kernels, create_attention_backend
from minisgl.core import Batch, EngineConfig, ModelFacts, StepCost
from minisgl.distributed import Communicator
from minisgl.engine import step_timing
from minisgl.engine.cuda_graph import DecodeGraph, DecodeGraphs, graph_sizes
from minisgl.engine.inputs import StepInputs, pack
from minisgl.engine.logits_processing import apply_history, edited, start_logprobs
from minisgl.engine.model_runner import DeviceState
from minisgl.engine.pending import LaunchedStep
from minisgl.engine.piecewise_graph import PieceGraphs, piece_sizes
from minisgl.engine.settings import (
    cpu_threads,
    memory_of,
    resolve_device,
    resolve_dtype,
    resolve_max_seq_len,
    resolve_num_pages,
)
from minisgl.kernel import (
    CompileLog,
    StepViews,
    compile_missing,
    update_pages,
    use_kernel_cache,
)
from minisgl.kvcache.pool import KVPool
from minisgl.layers.rotary import rope_table
from minisgl.models import Extensions, build_model, load_model_config, local_kv_spec

logger = logging.getLogger(__name__)

_MOST_CAPTURED = 256  # reqs, where the settings do not say
_PROBED_TOKENS = 128 * 1024  # contexts of the largest step that is timed
_DRIVER_BLOCK_BYTES = 2 * 2**20  # it takes memory in these: a difference is wrong by one at most


class Engine:
    """Runs steps in the order in which they are launched; implements core.EngineLike.

    On a GPU everything is queued on one stream of its own, and launch waits for nothing but the
    copies of the step before last. startup_s: how long which phase of the construction took.
    """

    # A subclass replaces these to run on a device that they do not know (minisgl.compile.dry_run).
    _resolve_device = staticmethod(resolve_device)
    _build_model = staticmethod(build_model)
    _create_attention = staticmethod(create_attention_backend)

    def __init__(
        self,
        config: EngineConfig,
        comm: Communicator,
        max_chunk_tokens: int = 8192,
        extensions: Extensions | None = None,
    ) -> None:
        """Load the model and allocate everything. Raises ConfigError or OutOfMemory.

        extensions: backends and linear methods from outside minisgl.

        max_chunk_tokens: prompt tokens of one step at most; the memory left to KV depends on it.
        """
        self._config = config
        self._comm = comm
        self._extensions = extensions or Extensions()
        self._model_config = load_model_config(config.model_path)
        self._device = self._resolve_device(config, comm.tp)
        self._dtype = resolve_dtype(config, self._model_config, self._device)
        self.max_seq_len = resolve_max_seq_len(config, self._model_config)
        self.page_size, self.max_running_reqs = config.page_size, config.max_running_reqs
        self._max_chunk_tokens = max_chunk_tokens
        self._show_progress = comm.tp.rank == 0
        self._graphs: DecodeGraphs | None = None
        self._pieces: PieceGraphs | None = None
        self._stream: torch.cuda.Stream | None = None
        self._compile_log = CompileLog()
        began_s = time.monotonic()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            self._prepare_kernels()
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        elif (threads := cpu_threads(comm.tp.size)) is not None:
            torch.set_num_threads(threads)
        with memory_of(self._device), self._on_stream():
            free_before = self._free_bytes()
            self._model = self._build_model(
                self._model_config,
                config.model_path,
                device=self._device,
                dtype=self._dtype,
                comm=comm,
                moe_backend=config.moe_backend,
                dummy_weight=config.dummy_weight,
                show_progress=self._show_progress,
                extensions=self._extensions,
            )
            self.num_pages = resolve_num_pages(
                config,
                self._model_config,
                comm,
                dtype=self._dtype,
                max_seq_len=self.max_seq_len,
                available_bytes=self._kv_bytes(free_before),
            )
            loaded_s = time.monotonic()
            self._state = self._assemble(self.num_pages)
            assembled_s = time.monotonic()
            assembled_free_bytes = self._free_bytes()
            most_tokens = max_chunk_tokens + config.max_running_reqs
            self._capture(graph_sizes(self._largest_graph()), piece_sizes(most_tokens))
            graph_bytes = assembled_free_bytes - self._free_bytes()
        self.startup_s = {
            "load": loaded_s - began_s,
            "kv_alloc": assembled_s - loaded_s,
            "cuda_graph": time.monotonic() - assembled_s,
        }
        logger.info(
            "engine loaded device=%s dtype=%s pages=%d page_size=%d kv_bytes=%d max_seq_len=%d "
            "graphs=%d graph_bytes=%d left_bytes=%d",
            self._device,
            self._dtype,
            self.num_pages,
            config.page_size,
            self._state.pool.num_bytes,
            self.max_seq_len,
            0 if self._graphs is None else len(self._graphs.graphs),
            graph_bytes,
            self._free_bytes(),
        )

    @torch.inference_mode()
    def launch(self, batch: Batch) -> LaunchedStep:
        """Start the step. On CPU it is done on return; on a GPU it is queued on the stream."""
        with self._on_stream():
            state = self._state
            graph = None if self._graphs is None else self._graphs.pick(batch)
            size = batch.num_reqs if graph is None else graph.size
            inputs = pack(batch, size, state.dummy_row, pinned=self._stream is not None)
            views = self._send(inputs, graph)
            update_pages(state.page_table, views.page_rows, views.page_cols, views.page_ids)
            if batch.extras is not None:
                apply_history(batch.extras, state.token_pool)
            hidden, logits = self._forward(batch, inputs, views, graph)
            if batch.extras is not None:
                return self._finish_extras(batch, inputs, views, graph, hidden, logits)
            chosen = None
            if logits is not None:
                draws, filters = _kinds(batch)
                if graph is not None:
                    (graph.filtered if filters else graph.plain).replay()
                    chosen = graph.chosen
                else:
                    chosen = state.choose(logits, views, draws, filters)
            return LaunchedStep(batch, inputs, chosen, by_graph=graph is not None)

    def _send(self, inputs: StepInputs, graph: DecodeGraph | None) -> StepViews:
        """One copy to the device: for a graph to where it reads."""
        if graph is None or self._graphs is None:
            return inputs.layout.views(inputs.packed.to(self._device, non_blocking=True))
        buffer = self._graphs.buffer[: inputs.layout.size]
        return inputs.layout.views(buffer.copy_(inputs.packed, non_blocking=True))

    def _forward(
        self, batch: Batch, inputs: StepInputs, views: StepViews, graph: DecodeGraph | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Hidden states [T or more, H], where log-probabilities of prompts are asked for, and
        logits [N, n] of this rank's ids, None when nobody samples."""
        if graph is not None:
            graph.forward.replay()
            return None, graph.logits
        state, n = self._state, batch.num_decode
        num_tokens = n + batch.num_prefill_tokens
        step = state.attention_step(views, n, inputs.start, inputs.lengths)
        attention = state.attention.prepare(step)
        attended = None
        if self._pieces is not None:
            attended = self._pieces.forward(views, n, num_tokens, attention)
        if attended is None:
            tokens = torch.empty((3, num_tokens), dtype=torch.int32, device=self._device)
            attended = state.forward(views, n, tokens, attention)
        every = batch.extras is not None and (batch.extras.prompt_logprobs >= 0).any()
        samples = batch.samples.any()
        if not (every or samples):
            return None, None
        model, last = state.model, views.first + views.lengths - 1
        if every:
            hidden = model.model.finish_last_layer(attended)
            return hidden, model.lm_head.logits(hidden[last]) if samples else None
        attended = attended.take_rows(last, self._comm)
        logits = None if self._graphs is None else self._graphs.finish(attended)
        return None, model.logits(attended) if logits is None else logits

    def _finish_extras(
        self,
        batch: Batch,
        inputs: StepInputs,
        views: StepViews,
        graph: DecodeGraph | None,
        hidden: Tensor | None,
        logits: Tensor | None,
    ) -> LaunchedStep:
        """Sample from edited logits, and start what else batch.extras asks for."""
        state, reqs = self._state, batch.num_reqs
        chosen = tokens = None
        if logits is not None:
            logits = state.model.lm_head.all_gather_logits(logits).float()
            changed = edited(logits, batch, inputs, state.token_pool)
            chosen = state.choose(changed, views, *_kinds(batch), whole=True)
            logits, tokens = logits[:reqs], chosen[0, :reqs]
        logprobs = start_logprobs(state.model, hidden, logits, tokens, batch, inputs)
        return LaunchedStep(batch, inputs, chosen, logprobs, by_graph=graph is not None)

    def facts(self) -> ModelFacts:
        model = self._model_config
        return ModelFacts(
            max_seq_len=self.max_seq_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            kv_capacity_tokens=self.num_pages * self.page_size,
            page_size=self.page_size,
            device=str(self._device),
            dtype=str(self._dtype).removeprefix("torch."),
            sampling_defaults=model.sampling_defaults,
        )

    def warm_up(self) -> None:
        """Run every kind of step once, on the dummy page, so that nothing compiles later: with
        graphs, which have run at all sizes, a few; without them steps of all sizes; and the
        largest, where the number of pages did not follow from it. Raises OutOfMemory."""
        dummy_page = self._state.pool.dummy_page
        with memory_of(self._device):
            step_timing.warm_up(self, dummy_page)
            if self._device.type != "cpu" and self._pieces is None:
                step_timing.every_size(self, dummy_page, self._max_chunk_tokens)
            if self._device.type != "cpu" and self._config.num_pages is not None:
                step_timing.largest_step(self, dummy_page, self._max_chunk_tokens)
        self._compile_log.finish()
        self._clear_dummy()

    def calibrate(self) -> StepCost:
        """Time a few steps on the dummy page and fit the cost formula; the same on all ranks."""

        def slowest_ns(own: int) -> int:
            return -self._comm.agree_min(-own)

        pool, num_ids = self._state.pool, self._model_config.vocab_size
        if self._stream is not None:  # what a CPU takes does not depend on the numbers
            with self._on_stream():
                pool.fill_noise(_PROBED_TOKENS // pool.page_size)
        cost = step_timing.calibrate(
            self, pool.dummy_page, self._max_chunk_tokens, num_ids, slowest_ns
        )
        self._clear_dummy()
        return cost

    def close(self) -> None:
        """Give the memory back. The communicator stays open: it belongs to the caller."""
        self._synchronize()
        self._graphs = self._pieces = None
        del self._model, self._state
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _prepare_kernels(self) -> None:
        """Search the kernel cache first, and compile the attention kernels that no cache holds.

        Only rank 0 compiles here and logs it; FlashInfer lets the other ranks wait for a module
        that is being compiled.
        """
        config = self._config
        major, minor = torch.cuda.get_device_capability(self._device)
        arch = 10 * major + minor
        head_dim = self._model_config.head_dim
        added = self._extensions.attention_backends
        needed = attention_kernels(config.attention_backend, self._dtype, head_dim, [arch], added)
        if config.kernel_cache is not None:
            use_kernel_cache(Path(config.kernel_cache), arch, [str(kernel) for kernel in needed])
        if self._show_progress:
            self._compile_log.watch()
            compile_missing(needed)

    def _assemble(self, num_pages: int) -> DeviceState:
        """Everything on the device but the graphs, over a pool of so many pages."""
        config, model = self._config, self._model_config
        pool = KVPool(
            local_kv_spec(model, self._comm, self._dtype),
            num_layers=model.num_kv_layers,
            num_pages=num_pages,
            page_size=config.page_size,
            device=self._device,
        )
        rows, max_pages = config.max_running_reqs + 1, -(-self.max_seq_len // config.page_size)
        return DeviceState(
            model=self._model,
            pool=pool,
            attention=self._create_attention(
                config.attention_backend,
                pool,
                model.q_heads // self._comm.tp.size,
                frozenset(layer.kind for layer in model.layers),
                self._extensions.attention_backends,
            ),
            cos_sin=rope_table(
                model.rope_theta, model.head_dim, model.rope_scaling, self.max_seq_len, self._device
            ),
            page_table=torch.full(
                (rows, max_pages), pool.dummy_page, dtype=torch.int32, device=self._device
            ),
            token_pool=torch.zeros(
                (rows, self.max_seq_len + 1), dtype=torch.int32, device=self._device
            ),
        )

    @torch.inference_mode()
    def _capture(self, sizes: Sequence[int], token_sizes: Sequence[int]) -> None:
        """Capture decode graphs and pieces of these sizes, on a GPU."""
        if self._device.type == "cuda" and sizes:
            show = self._show_progress
            graphs = DecodeGraphs(self._state, sizes, show)
            self._graphs = graphs
            if graphs.graphs:
                self._pieces = PieceGraphs(self._state, token_sizes, graphs.memory, show)
            self._clear_dummy()

    def _largest_graph(self) -> int:
        asked, rows = self._config.cuda_graph_max_bs, self._config.max_running_reqs
        return min(rows, _MOST_CAPTURED) if asked is None else min(asked, rows)

    def _kv_bytes(self, free_before: int) -> int:
        """Bytes for KV pages: a setting on CPU; on a GPU what is left of the share beside weights
        and what steps and graphs take, which is found out by running and capturing the largest."""
        if self._device.type == "cpu":
            return self._config.cpu_kv_bytes
        if self._config.num_pages is not None:
            return 0
        torch.cuda.synchronize(self._device)
        loaded = self._free_bytes()
        self.num_pages = 1
        self._state = self._assemble(self.num_pages)
        step_timing.largest_step(self, self._state.pool.dummy_page, self._max_chunk_tokens)
        steps = loaded - self._free_bytes()
        graphs = self._graph_bytes()
        del self._state
        torch.cuda.empty_cache()
        logger.info("memory beside weights and KV steps_bytes=%d graph_bytes=%d", steps, graphs)
        left = int(self._config.memory_ratio * free_before) - (free_before - loaded)
        return left - steps - graphs

    def _graph_bytes(self) -> int:
        """What all graphs take, by the two largest of either kind, captured on trial.

        Tensors of smaller graphs find room where those of larger ones were; what each further one
        takes is the driver's, outside of torch's pool, and mostly the number of its kernels (which
        size does not change: a piece graph for each layer). Both trials count from one beginning,
        since the driver may keep what it had for the first.
        """
        sizes = graph_sizes(self._largest_graph())
        tokens = piece_sizes(self._max_chunk_tokens + self._config.max_running_reqs)
        torch.cuda.empty_cache()
        before = self._free_bytes()
        taken: list[int] = []
        for count in (1, 2):
            self._capture(sizes[-count:], tokens[-count:])
            taken.append(before - self._free_bytes())
            self._graphs = self._pieces = None
            torch.cuda.empty_cache()
        others = max(len(sizes), len(tokens), 2) - 2
        each = max(taken[1] - taken[0], 0) + _DRIVER_BLOCK_BYTES if taken[1] else 0
        return taken[1] + each * others

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _clear_dummy(self) -> None:
        with self._on_stream():
            self._state.pool.clear_dummy()
            self._synchronize()

    def _free_bytes(self) -> int:
        if self._device.type != "cuda":
            return 0
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free)


def _kinds(batch: Batch) -> tuple[bool, bool]:
    """Whether some req draws at random, and whether some such req filters first."""
    asked = batch.sampling
    drawn: np.ndarray = asked.temperature > 0
    filters = drawn & ((asked.top_k > 0) | (asked.top_p < 1) | (asked.min_p > 0))
    return bool(drawn.any()), bool(filters.any())
