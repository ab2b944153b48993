"""`Engine`: one tensor-parallel worker with its model, KV pool, page table, token pool and sampler.

It runs the steps that the scheduler plans. It knows nothing of queues, prefixes or page ownership.
"""

import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from minisgl.attention.registry import attention_kernels, create_attention_backend
from minisgl.core import Batch, EngineConfig, ModelFacts, StepCost
from minisgl.distributed.comm import Communicator
from minisgl.engine import step_timing, warmup
from minisgl.engine.cuda_graph import graph_sizes
from minisgl.engine.extensions import DEFAULT_EXTENSIONS, Extensions
from minisgl.engine.memory import (
    cpu_threads,
    free_bytes,
    measure_graph_bytes,
    memory_of,
    resolve_device,
    resolve_dtype,
    resolve_max_seq_len,
    resolve_num_pages,
)
from minisgl.engine.model_runner import LaunchedStep, ModelRunner
from minisgl.engine.piecewise_graph import piece_sizes
from minisgl.engine.step_launcher import StepLauncher
from minisgl.kernel import (
    CompileLog,
    compile_missing,
    use_kernel_cache,
)
from minisgl.kvcache.pool import KVPool
from minisgl.layers.rotary import rope_table
from minisgl.models.build import build_model
from minisgl.models.config import load_model_config
from minisgl.models.decoder import local_kv_spec

logger = logging.getLogger(__name__)

_MAX_GRAPH_REQS = 256  # requests of the largest decode graph, unless the configuration says more
_PROBED_TOKENS = 128 * 1024  # contexts of the largest step that is timed


class Engine:
    """Runs steps in the order in which they are launched; implements core.EngineLike.

        engine = Engine(EngineConfig(model_path=folder), SingleCommunicator())
        result = engine.launch(batch).wait()

    On a GPU, steps are queued on one stream, and `launch` does not wait for them.

    num_pages, page_size, max_running_reqs, max_seq_len
                as in core.EngineLike.
    extensions  the lists that this engine was built with.
    startup_s   seconds of each phase of the construction, by its name.
    """

    # A subclass replaces these to run on a device that they do not know (minisgl.compile.dry_run).
    _resolve_device = staticmethod(resolve_device)
    _build_model = staticmethod(build_model)

    def __init__(
        self,
        config: EngineConfig,
        comm: Communicator,
        max_chunk_tokens: int = 8192,
        extensions: Extensions = DEFAULT_EXTENSIONS,
    ) -> None:
        """Load the model, allocate all memory and capture the graphs.

        max_chunk_tokens: limit of the prompt tokens of one step. A larger limit leaves less memory
        to the KV pool. Raises ConfigError or OutOfMemory.
        """
        self._config = config
        self._comm = comm
        self.extensions = extensions
        self._model_config = load_model_config(config.model_path)
        self._device = self._resolve_device(config, comm.tp)
        self._dtype = resolve_dtype(config, self._model_config, self._device)
        self.max_seq_len = resolve_max_seq_len(config, self._model_config)
        self.page_size, self.max_running_reqs = config.page_size, config.max_running_reqs
        self._max_chunk_tokens = max_chunk_tokens
        self._show_progress = comm.tp.rank == 0
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
            free_before = free_bytes(self._device)
            self._model = self._build_model(
                self._model_config,
                config.model_path,
                device=self._device,
                dtype=self._dtype,
                comm=comm,
                moe_backend=config.moe_backend,
                dummy_weight=config.dummy_weight,
                show_progress=self._show_progress,
                extensions=extensions,
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
            self._launcher = self._assemble(self.num_pages)
            assembled_s = time.monotonic()
            assembled_free_bytes = free_bytes(self._device)
            self._capture(*self._graph_sizes())
            graph_bytes = assembled_free_bytes - free_bytes(self._device)
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
            self._pool.num_bytes,
            self.max_seq_len,
            0 if self._launcher.graphs is None else len(self._launcher.graphs.graphs),
            graph_bytes,
            free_bytes(self._device),
        )

    def launch(self, batch: Batch) -> LaunchedStep:
        """Start the step. On a CPU it is done on return; on a GPU it is queued on the stream."""
        with self._on_stream():
            return self._launcher.launch(batch)

    def facts(self) -> ModelFacts:
        """Return the properties of the loaded model that the front end needs."""
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
        """Run steps of every kind on the dummy page, so that nothing compiles while serving.

        Without captured sizes, steps of all sizes run. The largest step runs if num_pages comes
        from the configuration; otherwise it has run to find the memory for the KV pool. Raises
        OutOfMemory.
        """
        dummy_page = self._pool.dummy_page
        with memory_of(self._device):
            warmup.warm_up(self, dummy_page)
            if self._device.type != "cpu" and self._launcher.pieces is None:
                warmup.run_every_size(self, dummy_page, self._max_chunk_tokens)
            if self._device.type != "cpu" and self._config.num_pages is not None:
                warmup.run_largest(self, dummy_page, self._max_chunk_tokens)
        self._compile_log.finish()
        self._clear_dummy()

    def calibrate(self) -> StepCost:
        """Time steps on the dummy page and fit their cost; the result is the same on all ranks."""

        def slowest_ns(own: int) -> int:
            return -self._comm.agree_min(-own)

        pool, num_ids = self._pool, self._model_config.vocab_size
        if self._stream is not None:  # the time of a CPU does not depend on the values
            with self._on_stream():
                pool.fill_noise(_PROBED_TOKENS // pool.page_size)
        cost = step_timing.calibrate(
            self, pool.dummy_page, self._max_chunk_tokens, num_ids, slowest_ns
        )
        self._clear_dummy()
        return cost

    def close(self) -> None:
        """Free the device's memory. The communicator stays open, because the caller owns it."""
        self._synchronize()
        del self._model, self._launcher
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
        added = self.extensions.attention_backends
        needed = attention_kernels(config.attention_backend, self._dtype, head_dim, [arch], added)
        if config.kernel_cache is not None:
            use_kernel_cache(Path(config.kernel_cache), arch, [str(kernel) for kernel in needed])
        if self._show_progress:
            self._compile_log.watch()
            compile_missing(needed)

    def _assemble(self, num_pages: int) -> StepLauncher:
        """Allocate everything on the device but the graphs, with a KV pool of num_pages pages."""
        config, model = self._config, self._model_config
        pool = KVPool(
            local_kv_spec(model, self._comm, self._dtype),
            num_layers=model.num_kv_layers,
            num_pages=num_pages,
            page_size=config.page_size,
            device=self._device,
        )
        rows, max_pages = config.max_running_reqs + 1, -(-self.max_seq_len // config.page_size)
        runner = ModelRunner(
            model=self._model,
            comm=self._comm,
            pool=pool,
            attention=create_attention_backend(
                config.attention_backend,
                pool,
                model.q_heads // self._comm.tp.size,
                frozenset(layer.kind for layer in model.layers),
                self.extensions.attention_backends,
            ),
            columns=self.extensions.sampling_columns,
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
        processors, pinned = self.extensions.logits_processors, self._stream is not None
        return StepLauncher(runner, processors, model.eos_token_ids, pinned)

    def _graph_sizes(self) -> tuple[list[int], list[int]]:
        """Return the numbers of requests and the numbers of tokens to capture graphs for."""
        asked, rows = self._config.cuda_graph_max_bs, self._config.max_running_reqs
        largest = min(rows, _MAX_GRAPH_REQS if asked is None else asked)
        return graph_sizes(largest), piece_sizes(self._max_chunk_tokens + rows)

    @torch.inference_mode()
    def _capture(self, sizes: Sequence[int], token_sizes: Sequence[int]) -> None:
        """Capture graphs of these numbers of requests and of tokens, on a GPU."""
        if self._device.type == "cuda" and sizes:
            self._launcher.capture(sizes, token_sizes, self._show_progress)
            self._clear_dummy()

    def _kv_bytes(self, free_before: int) -> int:
        """Return the memory for KV pages in bytes.

        On a CPU it is a setting. On a GPU it is the rest of memory_ratio beside weights, steps and
        graphs. To find these, the largest step runs and the largest graphs are captured.
        """
        device = self._device
        if device.type == "cpu":
            return self._config.cpu_kv_bytes
        if self._config.num_pages is not None:
            return 0
        torch.cuda.synchronize(device)
        free_loaded = free_bytes(device)
        self.num_pages = 1
        self._launcher = self._assemble(self.num_pages)
        warmup.run_largest(self, self._pool.dummy_page, self._max_chunk_tokens)
        step_bytes = free_loaded - free_bytes(device)
        sizes, token_sizes = self._graph_sizes()
        graph_bytes = measure_graph_bytes(
            capture=lambda count: self._capture(sizes[-count:], token_sizes[-count:]),
            release=self._launcher.release_graphs,
            kinds=max(len(sizes), len(token_sizes)),
            device=device,
        )
        del self._launcher
        torch.cuda.empty_cache()
        logger.info(
            "memory beside weights and KV steps_bytes=%d graph_bytes=%d", step_bytes, graph_bytes
        )
        share = int(self._config.memory_ratio * free_before)
        return share - (free_before - free_loaded) - step_bytes - graph_bytes

    @property
    def _pool(self) -> KVPool:
        return self._launcher.runner.pool

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _clear_dummy(self) -> None:
        with self._on_stream():
            self._pool.clear_dummy()
            self._synchronize()
