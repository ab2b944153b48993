"""`Engine`: one tensor-parallel worker with its model, KV pool, page table, token pool and sampler.

It runs the steps that the scheduler plans. It knows nothing of queues, prefixes or page ownership.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minisgl.attention.base import AttentionNeeds
from minisgl.attention.registry import attention_kernels, create_attention_backend
from minisgl.build import (
    AttentionKernel,
    CompileLog,
    compile_missing,
    use_kernel_cache,
    use_recorded_key,
)
from minisgl.core import Batch, EngineConfig, ModelFacts, OutOfMemory, StepCost, WindowLayers
from minisgl.core.batch import DRAFT_WIDTHS, MAX_DRAFTS
from minisgl.distributed.comm import Communicator
from minisgl.engine import calibration, memory, warmup
from minisgl.engine.check import check_memory
from minisgl.engine.extensions import DEFAULT_EXTENSIONS, Extensions
from minisgl.engine.graphs import DecodeShape, capture_steps
from minisgl.engine.launched import LaunchedStep
from minisgl.engine.model_runner import DraftTensors, ModelRunner
from minisgl.engine.stages import CachedLengths, Stage
from minisgl.engine.step import StepLauncher, StepParts
from minisgl.engine.step_tensors import Packer
from minisgl.kvcache.pool import KVPool, kv_page_bytes
from minisgl.layers.rotary import query_scale_table, rope_table
from minisgl.models.build import build_model
from minisgl.models.config import load_model_spec
from minisgl.utils.startup import Progress, Stopwatch

logger = logging.getLogger(__name__)

# The driver allocates memory in units of this size. A measured size is uncertain by one unit.
_DRIVER_BLOCK_BYTES = 2 * 2**20
_TIMED_TOKENS = 128 * 1024  # tokens of all contexts together in the largest timed step


class Engine:
    """Runs steps in the order in which they are launched; implements core.EngineLike.

        engine = Engine(EngineConfig(model_path=folder), SingleCommunicator())
        result = engine.launch(batch).wait()

    On a GPU, steps are queued on one stream, and `launch` does not wait for them.

    num_pages, page_size, max_running_reqs, max_seq_len
                as in core.EngineLike.
    extensions  the extensions that the caller passed to the constructor.
    startup     seconds of each phase of the start.
    """

    # A subclass replaces these two functions to run on a device that they do not support
    # (minisgl.compile.dry_run).
    _resolve_device = staticmethod(memory.resolve_device)
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
        model = load_model_spec(config.model_path)
        self._device = self._resolve_device(config, comm.tp)
        resolved = memory.resolve(config, model, comm.tp, self._device, self._drafting)
        self._model_config, self.max_seq_len, self._kv_spec, needs = resolved
        self.page_size, self.max_running_reqs = config.page_size, config.max_running_reqs
        self._max_chunk_tokens = max_chunk_tokens
        self._show_progress = comm.tp.rank == 0
        self._stream: torch.cuda.Stream | None = None
        self._compile_log = CompileLog()
        self._attention_kernels: list[AttentionKernel] = []  # empty on a CPU
        self._wait_for_kernels: Callable[[], None] = lambda: None
        self.startup = Stopwatch(lambda: self._compile_log.compile_s)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            with self.startup.phase("compile"):
                self._prepare_kernels(needs)
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        elif (threads := memory.cpu_threads(comm.tp.size)) is not None:
            torch.set_num_threads(threads)
        if self._device.type == "cpu" and config.dummy_weight:
            check_memory(config, resolved, comm.tp, extensions, self._sizes_of_pools(free_before=0))
        with memory.memory_of(self._device), self._on_stream():
            free_before = memory.free_bytes(self._device)
            with self.startup.phase("weights"):
                self._model = self._build_model(
                    self._model_config,
                    config.model_path,
                    device=self._device,
                    dtype=self._kv_spec.dtype,
                    comm=comm,
                    moe_backend=config.moe_backend,
                    quantization=config.quantization,
                    dummy_weight=config.dummy_weight,
                    show_progress=self._show_progress,
                    extensions=extensions,
                )
            if self._device.type == "cuda":
                with self.startup.phase("compile"):
                    self._wait_for_kernels()
            with self.startup.phase("kv"):
                self._launcher = self._assemble(self._sizes_of_pools(free_before))
            assembled_free_bytes = memory.free_bytes(self._device)
            with self.startup.phase("graphs"):
                self._capture(*self._graph_sizes())
            graph_bytes = assembled_free_bytes - memory.free_bytes(self._device)
        logger.info(
            "engine loaded device=%s dtype=%s pages=%d window_pages=%d page_size=%d kv_bytes=%d "
            "max_seq_len=%d graphs=%d graph_bytes=%d left_bytes=%d",
            self._device,
            self._kv_spec.dtype,
            self.num_pages,
            0 if self.window is None else self.window.num_pages,
            config.page_size,
            sum(pool.num_bytes for pool in self._pools),
            self.max_seq_len,
            len(self._launcher.graphs.decode),
            graph_bytes,
            memory.free_bytes(self._device),
        )
        if self._kv_spec.fp8:
            unquantised = self._kv_spec._replace(fp8=False)
            gain = unquantised.token_bytes / self._kv_spec.token_bytes
            logger.info("KV cache in fp8: %.2f times as many tokens fit into the same memory", gain)

    def launch(self, batch: Batch) -> LaunchedStep:
        """Start the step. On a CPU it is done on return; on a GPU it is queued on the stream."""
        with self._on_stream():
            return self._launcher.launch(batch)

    def facts(self) -> ModelFacts:
        """Return the properties of the loaded model that the front end needs."""
        model, dtype = self._model_config, str(self._kv_spec.dtype).removeprefix("torch.")
        return ModelFacts(
            max_seq_len=self.max_seq_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            kv_capacity_tokens=self.num_pages * self.page_size,
            page_size=self.page_size,
            device=str(self._device),
            dtype=dtype,
            kv_dtype="fp8" if self._kv_spec.fp8 else dtype,
            sampling_defaults=model.sampling_defaults,
            drafts=self._drafting,
        )

    def warm_up(self) -> None:
        """Run steps of every kind on the dummy page, so that no kernel compiles while serving.

        On a GPU it also runs steps of all sizes if there are no piecewise graphs, and the largest
        step if the configuration sets num_pages. Without num_pages the constructor has already run
        the largest step, to measure the memory for the KV pool. Raises OutOfMemory.
        """
        with memory.memory_of(self._device), self.startup.phase("warm_up"):
            warmup.warm_up(self, DRAFT_WIDTHS if self._drafting else DRAFT_WIDTHS[:1])
            with self._on_stream():
                self._launcher.warm_up_masks()
            if self._device.type != "cpu" and not self._launcher.graphs.pieces:
                warmup.run_every_size(self, self._max_chunk_tokens)
            if self._device.type != "cpu" and self._config.num_pages is not None:
                warmup.run_largest(self, self._max_chunk_tokens, self._drafting)
        self._compile_log.finish()
        self._clear_dummy()

    def calibrate(self) -> StepCost:
        """Return the cost of steps, which is the same on all ranks (minisgl.engine.calibration).

        The first start times steps on the dummy page and fits the cost to the timings. Later starts
        read the timings from a file, and time three steps to check them.
        """
        # On a GPU the values in the KV pool change the time of a step, so the pool is filled with
        # noise. On a CPU there is no stream, and the values do not change the time.
        if self._stream is not None:
            with self._on_stream():
                for pool in self._pools:
                    pool.fill_noise(_TIMED_TOKENS // self.page_size)
        with self.startup.phase("calibration"):
            chunk, parts = self._max_chunk_tokens, (self.extensions, self._attention_kernels)
            file = calibration.file_for(self._config, self._device, chunk, *parts)
            vocab_size = self._model_config.vocab_size
            cost = calibration.step_cost(self, self._comm, chunk, vocab_size, self._drafting, file)
        self._clear_dummy()
        return cost

    def close(self) -> None:
        """Free the device's memory. The communicator stays open, because the caller owns it."""
        self._synchronize()
        del self._model, self._launcher
        torch.cuda.empty_cache()  # does nothing in a process that has not used a GPU

    def _prepare_kernels(self, needs: AttentionNeeds) -> None:
        """Add the kernel cache to the searched folders; start to compile missing attention kernels.

        The compilers run while the weights load. Only rank 0 compiles and logs here. When another
        rank needs a module that is being compiled, FlashInfer makes that rank wait.
        """
        config = self._config
        major, minor = torch.cuda.get_device_capability(self._device)
        arch = 10 * major + minor
        added = self.extensions.attention_backends
        needed = attention_kernels(config.attention_backend, needs, [arch], added)
        self._attention_kernels = needed
        use_recorded_key()
        if config.kernel_cache is not None:
            use_kernel_cache(Path(config.kernel_cache), arch, [str(kernel) for kernel in needed])
        if self._show_progress:
            self._compile_log.watch()
            self._wait_for_kernels = compile_missing(needed)

    def _assemble(self, counts: Sequence[int]) -> StepLauncher:
        """Allocate all device memory except for graphs, and set num_pages and window.

        counts: the pages of each KV pool.
        """
        config, model, window = self._config, self._model_config, self._model_config.window
        self.num_pages = counts[0]
        self.window = None if window is None else WindowLayers(window, counts[-1])
        pools = tuple(
            KVPool(
                self._kv_spec,
                layers=layers,
                num_pages=count,
                page_size=config.page_size,
                device=self._device,
            )
            for layers, count in zip(model.pools, counts, strict=True)
        )
        rows = config.max_running_reqs + 1
        # A draft may stand after the last position of a context. Its results are dropped.
        drafts = MAX_DRAFTS if self._drafting else 0
        tables = [
            rope_table(rope, model.head_dim, self.max_seq_len, self._device) for rope in model.ropes
        ]
        max_pages = -(-self.max_seq_len // config.page_size) + -(-drafts // config.page_size)
        page_tables = [
            torch.full((rows, max_pages), pool.dummy_page, dtype=torch.int32, device=self._device)
            for pool in pools
        ]
        positions = self.max_seq_len + drafts + 1
        token_pool = torch.zeros((rows, positions), dtype=torch.int32, device=self._device)
        drafting: DraftTensors | None = None
        if self._drafting:
            zeros = torch.zeros((3, rows), dtype=torch.int32, device=self._device)
            drafting = DraftTensors(*zeros)
        runner = ModelRunner(
            model=self._model,
            pools=pools,
            attention=create_attention_backend(
                config.attention_backend,
                pools[0],
                model.q_heads // self._comm.tp.size,
                model.rules,
                self.extensions.attention_backends,
                *pools[1:],
            ),
            packer=Packer(
                self.extensions.sampling_columns,
                dummy_row=config.max_running_reqs,
                max_pages=max_pages,
                pinned=self._device.type == "cuda",
            ),
            ropes=tuple(_with_rows(table, drafts) for table in tables),
            query_scale=query_scale_table(model.query_scale, positions, self._device),
            page_table=torch.cat(page_tables),
            token_pool=token_pool,
            drafts=drafting,
        )
        stages: list[Stage] = [] if drafting is None else [CachedLengths(drafting)]
        stages += [make(runner) for make in self.extensions.stages]
        parts = StepParts(runner, tuple(stages), self.extensions.finish(runner))
        return StepLauncher(parts, self.extensions.logits_processors)

    @property
    def _drafting(self) -> bool:
        return self.extensions.draft_lengths is not None

    def _graph_sizes(self) -> tuple[list[DecodeShape], list[int]]:
        config, model = self._config, self._model_config
        return memory.graph_sizes(config, model, self._max_chunk_tokens, self._drafting)

    @torch.inference_mode()
    def _capture(self, shapes: Sequence[DecodeShape], token_sizes: Sequence[int]) -> list[int]:
        """Capture graphs of these decode steps and numbers of tokens, on a GPU.

        Returns the free memory before the captures and after each of them.
        """
        free = [memory.free_bytes(self._device)]

        def largest_first(sizes: Sequence[Any], title: str) -> Iterator[Any]:
            for size in Progress(sizes[::-1], desc=title, disable=not self._show_progress):
                yield size
                free.append(memory.free_bytes(self._device))

        if self._device.type == "cuda" and shapes:
            parts, processors = self._launcher.parts, self._launcher.processors
            graphs = capture_steps(parts, shapes, token_sizes, largest_first)
            self._launcher = StepLauncher(parts, processors, graphs)
            self._clear_dummy()
        return free

    def _sizes_of_pools(self, free_before: int) -> list[int]:
        """Return the pages of each KV pool, the same on every rank. Raises OutOfMemory."""
        config, size, model = self._config, self._config.page_size, self._model_config
        given, window, length = config.num_pages, model.window, self.max_seq_len
        if given is not None and window is not None:
            return [given, memory.window_pages_for(config, given, window, self._max_chunk_tokens)]
        if given is not None:
            return [given]
        on_cpu = self._device.type == "cpu"
        available = config.cpu_kv_bytes if on_cpu else self._gpu_kv_bytes(free_before)
        page_bytes = [kv_page_bytes(self._kv_spec, len(layers), size) for layers in model.pools]
        fitting = memory.pages_that_fit(config, available, page_bytes, length, window)
        found = [self._comm.agree_min(count) for count in fitting]
        least = 1 if window is None else WindowLayers(window, 0).reserve(size)
        if found[0] < 1 or found[-1] < least:
            raise OutOfMemory(
                f"one KV page of {size} tokens takes {sum(page_bytes)} bytes, and at least "
                f"{least} pages are needed, but only {available} bytes are left; raise "
                "memory_ratio (on a CPU, raise cpu_kv_bytes) or lower max_running_reqs"
            )
        return found

    def _gpu_kv_bytes(self, free_before: int) -> int:
        """Return the memory for KV pages on a GPU, in bytes.

        The engine may use the share memory_ratio of the memory that was free before the weights
        were loaded. The KV pages get the part of this share that weights, steps and graphs do not
        need. To measure the memory of steps and graphs, this method runs the largest step and
        captures the largest graphs.
        """
        device = self._device
        torch.cuda.synchronize(device)
        free_loaded = memory.free_bytes(device)
        self._launcher = self._assemble([1] * len(self._model_config.pools))
        warmup.run_largest(self, self._max_chunk_tokens, self._drafting)
        step_bytes = free_loaded - memory.free_bytes(device)
        graph_bytes = self._measure_graph_bytes()
        del self._launcher
        torch.cuda.empty_cache()
        logger.info(
            "memory of steps and graphs steps_bytes=%d graph_bytes=%d", step_bytes, graph_bytes
        )
        taken = free_before - free_loaded + step_bytes + graph_bytes
        return memory.kv_bytes_left(self._config, free_before, taken)

    def _measure_graph_bytes(self) -> int:
        """Return the memory that all graphs will take, in bytes, from trial captures.

        The trial captures the two largest graphs of each kind. The memory that the second ones
        take, plus a margin of one block of the driver, is the memory of one further graph. The
        result is the memory of the trial, plus this amount for each graph that the trial lacks.

        The tensors of smaller graphs reuse the memory of larger graphs, but each further graph also
        takes memory of the driver, outside of torch's pool. The size of this memory depends mostly
        on the number of kernels in the graph. That number is the same for every batch size.
        """
        sizes, token_sizes = self._graph_sizes()
        torch.cuda.empty_cache()
        free = self._capture(sizes[-2:], token_sizes[-2:])
        taken = free[0] - memory.free_bytes(self._device)
        self._launcher = StepLauncher(self._launcher.parts, self._launcher.processors)
        torch.cuda.empty_cache()
        each = memory.further_graph_bytes(free, min(len(sizes), 2)) + _DRIVER_BLOCK_BYTES
        return taken + each * memory.further_graphs(sizes, token_sizes) if taken else 0

    @property
    def _pools(self) -> tuple[KVPool, ...]:
        return self._launcher.runner.pools

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _clear_dummy(self) -> None:
        with self._on_stream():
            for pool in self._pools:
                pool.clear_dummy()
            self._synchronize()


def _with_rows(table: Tensor, count: int) -> Tensor:
    """Return `table`, [positions, n], with its last row repeated `count` times after it."""
    return torch.cat((table, table[-1:].expand(count, -1))) if count else table
