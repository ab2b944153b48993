"""`Start`: the phases of the start of an engine, from the kernels to the captured graphs."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minisgl.attention.registry import attention_kernels, create_attention_backend
from minisgl.build.cache import use_kernel_cache
from minisgl.build.compile_log import CompileLog
from minisgl.build.flashinfer_jit import compile_missing
from minisgl.build.triton_key import use_recorded_key
from minisgl.core import ConfigError, EngineConfig, OutOfMemory
from minisgl.core.config import MAX_DRAFTS
from minisgl.distributed.comm import Communicator
from minisgl.engine import memory, states, trial, warmup
from minisgl.engine.check import check_memory
from minisgl.engine.extensions import Extensions
from minisgl.engine.graphs import DecodeShape, capture_steps
from minisgl.engine.host_copies import check_host_cache, device_bytes
from minisgl.engine.images import image_buffer, image_limits, image_stages, mixed_angles
from minisgl.engine.model_runner import DraftTensors, ModelRunner
from minisgl.engine.segments import reserve_block
from minisgl.engine.stages import CachedLengths, Stage
from minisgl.engine.state_copies import CopyStates
from minisgl.engine.step import StepLauncher, StepParts
from minisgl.engine.step_tensors import Packer
from minisgl.kvcache.pool import KVPool
from minisgl.layers.rotary import query_scale_table, rope_table
from minisgl.layers.states import StateBuild
from minisgl.models.config import draft_method, engine_model
from minisgl.models.decoder import CausalLM
from minisgl.utils.startup import Progress, Stopwatch

logger = logging.getLogger(__name__)


class Start:
    """The values of one rank that its start resolves, and the phases that use them.

    drafting     whether steps have drafts.
    resolved     the values that the configuration leaves open.
    stream       the stream of all steps; None on a CPU.
    compile_log  logs the kernels that compile.
    startup      seconds of each phase.
    """

    def __init__(
        self,
        config: EngineConfig,
        comm: Communicator,
        max_chunk_tokens: int,
        extensions: Extensions,
        device: torch.device,
    ) -> None:
        """Resolve the configuration. Raises ConfigError."""
        self.config, self.device = config, device
        self._comm, self._extensions = comm, extensions
        self.drafting = extensions.draft_lengths is not None
        method = draft_method(config)
        if method is not None and not self.drafting:
            raise ConfigError(
                f"speculative is {method}, but the extensions have no draft_lengths; build the "
                "extensions with drafts.with_speculation, or leave speculative out"
            )
        model = engine_model(config)
        self.resolved = memory.resolve(config, model, comm.tp, device)
        self.max_chunk_tokens = memory.largest_chunk(model, max_chunk_tokens, config.page_size)
        if self.resolved.model.states:
            states.check_chunks(max_chunk_tokens, config.page_size)
        check_host_cache(config, extensions.cache_kinds)
        self._show_progress = comm.tp.rank == 0
        self.stream: torch.cuda.Stream | None = None
        # Of the error of too little memory for KV pages. The trial of a GPU replaces it.
        self._remedy = "; raise cpu_kv_bytes"
        self._block_bytes = 0  # of the block that torch keeps for steps
        self.compile_log = CompileLog()
        self.startup = Stopwatch(lambda: self.compile_log.compile_s)

    def run(self, build: Callable[..., CausalLM]) -> StepLauncher:
        """Load the model, allocate all memory and capture the graphs.

        build: models.build.build_model, or a function with the same parameters. Raises ConfigError
        or OutOfMemory.
        """
        device, tp = self.device, self._comm.tp
        if device.type == "cuda":
            torch.cuda.set_device(device)
            with self.startup.phase("compile"):
                wait_for_kernels = self._prepare_kernels()
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        elif (threads := memory.cpu_threads(self.config)) is not None:
            torch.set_num_threads(threads)
        if device.type == "cpu":
            available = self.config.cpu_kv_bytes
            self.config = states.limit_rows(self.config, self._row_bytes(), available, self._comm)
        if device.type == "cpu" and self.config.dummy_weight:
            pages = self._sizes_of_pools(lambda: 0)
            state_bytes = self._row_bytes() * (self.config.max_running_reqs + 1)
            check_memory(self.config, self.resolved, tp, self._extensions, pages, state_bytes)
        with memory.memory_of(device), self.on_stream():
            free_before = memory.free_bytes(device)
            with self.startup.phase("weights"):
                model = self._load(build)
            if device.type == "cuda":
                taken = free_before - memory.free_bytes(device)
                left = memory.kv_bytes_left(self.config, free_before, taken)
                self.config = states.limit_rows(self.config, self._row_bytes(), left, self._comm)
                with self.startup.phase("compile"):
                    wait_for_kernels()
            with self.startup.phase("kv"):
                pages = self._sizes_of_pools(lambda: self._gpu_kv_bytes(model, free_before))
                launcher = self.assemble(model, pages)
            assembled_free_bytes = memory.free_bytes(device)
            with self.startup.phase("graphs"):
                launcher, _ = self._capture(launcher, *self.graph_sizes())
            graph_bytes = assembled_free_bytes - memory.free_bytes(device)
            reserve_block(self._block_bytes, device)
        self._log(launcher, graph_bytes)
        return launcher

    def assemble(self, model: CausalLM, counts: Sequence[int]) -> StepLauncher:
        """Allocate all device memory except for graphs. counts: the pages of each KV pool.

        Raises ConfigError if the model has a draft head and no stage runs it, or the other way
        round.
        """
        config, spec, device = self.config, self.resolved.model, self.device
        max_seq_len = self.resolved.max_seq_len

        def int32(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int32, device=device)

        pools = tuple(
            KVPool(
                kv,
                layers=layers,
                num_pages=count,
                page_size=config.page_size,
                device=device,
            )
            for kv, layers, count in zip(self.resolved.kv_specs, spec.pools, counts, strict=True)
        )
        rows = config.max_running_reqs + 1
        images = image_limits(config, spec, self._comm.tp, device)
        # A draft may stand after the last position of a context. Its results are dropped.
        drafts = MAX_DRAFTS if self.drafting else 0
        max_pages = -(-max_seq_len // config.page_size) + -(-drafts // config.page_size)
        positions = max_seq_len + drafts + 1
        angles = mixed_angles(spec, max_seq_len + drafts, device)
        mixed = 0 if angles is None else self.max_chunk_tokens
        widths = spec.rope_widths.items()
        tables = [rope_table(rope, width, max_seq_len, device) for rope, width in widths]
        page_tables = [int32(rows, max_pages, fill=pool.dummy_page) for pool in pools]
        runner = ModelRunner(
            model=model,
            pools=pools,
            attention=create_attention_backend(
                config.attention_backend,
                pools[0],
                spec.q_heads // self._comm.tp.size,
                spec.rules,
                self._extensions.attention_backends,
                *pools[1:],
            ),
            packer=Packer(
                self._extensions.sampling_columns,
                dummy_row=config.max_running_reqs,
                max_pages=max_pages,
                pinned=device.type == "cuda",
            ),
            max_seq_len=max_seq_len,
            ropes=tuple(_with_rows(table, drafts + mixed) for table in tables),
            query_scale=query_scale_table(spec.query_scale, positions, device),
            page_table=torch.cat(page_tables),
            token_pool=int32(rows, positions),
            drafts=DraftTensors(*int32(3, rows)) if self.drafting else None,
            states=states.allocate_states(spec.states, self._state_build()),
            angles=angles,
            images=image_buffer(model, images),
        )
        stages: list[Stage] = [] if runner.drafts is None else [CachedLengths(runner.drafts)]
        if runner.states is not None:
            stages.append(CopyStates(runner.states, pools[0]))
        stages += image_stages(runner)
        stages += [make(runner) for make in self._extensions.stages]
        parts = StepParts(runner, tuple(stages), self._extensions.finish(runner))
        if model.mtp is not None and not parts.reads_hidden:
            raise ConfigError(
                "speculative is mtp, but no stage of the extensions runs the draft head; build the "
                "extensions with drafts.with_speculation, or set speculative to ngram"
            )
        processors = self._extensions.logits_processors
        return StepLauncher(parts, processors, self.on_stream(), images=images)

    def graph_sizes(self) -> tuple[list[DecodeShape], list[int]]:
        """Return the shapes of decode steps and the numbers of tokens to capture graphs for."""
        model, chunk = self.resolved.model, self.max_chunk_tokens
        return memory.graph_sizes(self.config, model, chunk, self.drafting)

    def on_stream(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which torch queues work on the stream of the steps."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _prepare_kernels(self) -> Callable[[], None]:
        """Add the kernel cache to the searched folders; start to compile missing attention kernels.

        The compilers run while the weights load; the result waits for them. Only rank 0 compiles
        and logs here. When another rank needs a module that is being compiled, FlashInfer makes
        that rank wait.
        """
        config = self.config
        major, minor = torch.cuda.get_device_capability(self.device)
        arch = 10 * major + minor
        added, name = self._extensions.attention_backends, config.attention_backend
        needed = attention_kernels(name, self.resolved.attention_needs, [arch], added)
        use_recorded_key()
        if config.kernel_cache is not None:
            use_kernel_cache(Path(config.kernel_cache), arch, [str(kernel) for kernel in needed])
        if not self._show_progress:
            return lambda: None
        self.compile_log.watch()
        return compile_missing(needed)

    def _load(self, build: Callable[..., CausalLM]) -> CausalLM:
        before = memory.torch_bytes(self.device)
        model = build(
            self.resolved.model,
            self.config,
            device=self.device,
            dtype=self.resolved.dtype,
            comm=self._comm,
            extensions=self._extensions,
            show_progress=self._show_progress,
        )
        memory.log_gaps(model, self.device, before)
        return model

    @torch.inference_mode()
    def _capture(
        self, launcher: StepLauncher, shapes: Sequence[DecodeShape], token_sizes: Sequence[int]
    ) -> tuple[StepLauncher, list[int]]:
        """Capture graphs of these decode steps and numbers of tokens, on a GPU.

        Returns a launcher with the graphs, and the free memory before the captures and after each
        of them.
        """
        free = [memory.free_bytes(self.device)]

        def largest_first(sizes: Sequence[Any], title: str) -> Iterator[Any]:
            for size in Progress(sizes[::-1], desc=title, disable=not self._show_progress):
                yield size
                free.append(memory.free_bytes(self.device))

        if self.device.type == "cuda" and shapes:
            graphs = capture_steps(launcher.parts, shapes, token_sizes, largest_first)
            processors, on_stream = launcher.processors, launcher.on_stream
            launcher = StepLauncher(launcher.parts, processors, on_stream, graphs, launcher.images)
            launcher.runner.clear_dummy()
            # The runs before the captures leave memory that the next steps take from their block.
            torch.cuda.empty_cache()
        return launcher, free

    def _sizes_of_pools(self, gpu_kv_bytes: Callable[[], int]) -> list[int]:
        """Return the pages of each KV pool, the same on every rank. Raises OutOfMemory.

        gpu_kv_bytes: measures the memory for the pools on a GPU, if the configuration leaves it
        open.
        """
        config, size, resolved = self.config, self.config.page_size, self.resolved
        given, window = config.num_pages, resolved.model.window
        if given is not None and window is not None:
            return [given, memory.window_pages_for(config, given, window, self.max_chunk_tokens)]
        if given is not None:
            return [given]
        on_cpu = config.cpu_kv_bytes - self._row_bytes() * (config.max_running_reqs + 1)
        available = on_cpu if self.device.type == "cpu" else gpu_kv_bytes()
        fitting = memory.pages_that_fit(config, resolved, available, self._state_build())
        found = [self._comm.agree_min(count) for count in fitting]
        least = max(resolved.window_pages(size), 1)
        if found[0] < 1 or found[-1] < least:
            page_bytes = sum(resolved.page_bytes(size))
            raise OutOfMemory(
                f"one KV page of {size} tokens takes {page_bytes} bytes, and at least "
                f"{least} pages are needed, but only {available} bytes are left{self._remedy} or "
                "lower max_running_reqs"
            )
        return found

    def _state_build(self) -> StateBuild:
        tp, device = self._comm.tp, self.device
        return states.state_build(self.config, self.resolved.dtype, tp, device, self.drafting)

    def _row_bytes(self) -> int:
        """Return the bytes of the recurrent states of one row."""
        return states.row_bytes(self.resolved.model.states, self._state_build())

    def _gpu_kv_bytes(self, model: CausalLM, free_before: int) -> int:
        """Return the memory for KV pages on a GPU, in bytes.

        The engine may use the share memory_ratio of the memory that was free before the weights
        were loaded. The KV pages get the part of this share that neither weights, steps, graphs nor
        the copies of a host cache need. The memory of steps and graphs is measured: see trial.py.
        """
        torch.cuda.synchronize(self.device)
        free_loaded = memory.free_bytes(self.device)
        found = trial.run_trial(
            lambda: self.assemble(model, [1] * len(self.resolved.model.pools)),
            lambda made: warmup.run_largest(made, self.max_chunk_tokens, self.drafting),
            self._capture,
            self.graph_sizes(),
            self.device,
        )
        self._block_bytes = found.block
        logger.info(
            "memory of steps and graphs steps_bytes=%d block_bytes=%d graph_bytes=%d",
            found.steps,
            found.block,
            found.graphs,
        )
        weights, copies = free_before - free_loaded, device_bytes(self.config)
        self._remedy = found.remedy(weights, copies, self.max_chunk_tokens)
        taken = weights + found.steps + found.graphs + copies
        return memory.kv_bytes_left(self.config, free_before, taken)

    def _log(self, launcher: StepLauncher, graph_bytes: int) -> None:
        spec = self.resolved.kv_specs[0]
        logger.info(
            "engine loaded device=%s dtype=%s pages=%d window_pages=%d page_size=%d kv_bytes=%d "
            "max_seq_len=%d graphs=%d graph_bytes=%d left_bytes=%d",
            self.device,
            spec.dtype,
            launcher.num_pages,
            sum(pool.num_pages for pool in launcher.runner.pools[1:]),
            launcher.page_size,
            sum(pool.num_bytes for pool in launcher.runner.pools),
            launcher.max_seq_len,
            len(launcher.graphs.decode),
            graph_bytes,
            memory.free_bytes(self.device),
        )
        if spec.fp8:
            gain = spec._replace(fp8=False).token_bytes / spec.token_bytes
            logger.info("KV cache in fp8: %.2f times as many tokens fit into the same memory", gain)


def _with_rows(table: Tensor, count: int) -> Tensor:
    """Return `table`, [positions, n], with its last row repeated `count` times after it."""
    return torch.cat((table, table[-1:].expand(count, -1))) if count else table
