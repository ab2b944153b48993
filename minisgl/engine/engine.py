"""`Engine`: one tensor-parallel worker with its model, KV pool, page table, token pool and sampler.

It runs the steps that the scheduler plans. It knows nothing of queues, prefixes or page ownership.
"""

import torch

from minisgl.core import EngineConfig, ModelFacts
from minisgl.core.config import DRAFT_WIDTHS
from minisgl.core.images import ImageLimits
from minisgl.core.page_copier import PageCopier
from minisgl.core.step_cost import TimedStep
from minisgl.distributed.comm import Communicator
from minisgl.engine import memory, warmup
from minisgl.engine.extensions import DEFAULT_EXTENSIONS, Extensions
from minisgl.engine.host_copies import host_copies
from minisgl.engine.start import Start
from minisgl.models.build import build_model
from minisgl.models.spec import ModelSpec

# Tokens of the chunks that the warm-up times. The host bounds a step of 512 tokens of a small
# model, and the GPU one of 2,048. A CPU takes seconds for many tokens of a large model.
_TIMED_CHUNKS, _TIMED_CHUNKS_CPU = (512, 2048), (32,)


class Engine:
    """Runs steps in the order in which they are launched; implements core.EngineLike.

        engine = Engine(EngineConfig(model_path=folder), SingleCommunicator())
        result = engine.launch(batch).wait()

    On a GPU, steps are queued on one stream, and `launch` does not wait for them.

    launch      as in core.EngineLike. On a CPU the step is complete on return; on a GPU it is
                queued on the stream of all steps.
    num_pages, page_size, max_running_reqs, max_seq_len, window, snapshot_pages, images
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
        self.extensions = extensions
        device = self._resolve_device(config, comm.tp)
        self._start = start = Start(config, comm, max_chunk_tokens, extensions, device)
        self._launcher = launcher = start.run(self._build_model)
        self.launch = launcher.launch
        self.startup = start.startup
        self.num_pages, self.page_size = launcher.num_pages, launcher.page_size
        self.max_running_reqs, self.max_seq_len = launcher.max_running_reqs, launcher.max_seq_len
        self.window, self.snapshot_pages = launcher.window, launcher.snapshot_pages
        pools = launcher.runner.pools
        with memory.memory_of(device), start.on_stream(), self.startup.phase("kv"):
            self._copies = host_copies(start.config, comm, pools)
        self.copier: PageCopier | None = self._copies
        self.images: ImageLimits | None = launcher.images

    @property
    def config(self) -> EngineConfig:
        """The configuration that the caller passed to the constructor."""
        return self._start.config

    @property
    def model(self) -> ModelSpec:
        """The model, as this engine runs it."""
        return self._start.resolved.model

    @property
    def device_name(self) -> str:
        """The name of the GPU, or "cpu"."""
        device = self._start.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

    def facts(self) -> ModelFacts:
        """Return the properties of the loaded model that the front end needs."""
        resolved = self._start.resolved
        model, dtype = resolved.model, str(resolved.dtype).removeprefix("torch.")
        return ModelFacts(
            max_seq_len=self.max_seq_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            kv_capacity_tokens=self.num_pages * self.page_size,
            page_size=self.page_size,
            device=str(self._start.device),
            dtype=dtype,
            kv_dtype="fp8" if resolved.kv_specs[0].fp8 else dtype,
            sampling_defaults=model.sampling_defaults,
            drafts=self._start.drafting,
            images=self.images is not None,
        )

    def warm_up(self) -> list[TimedStep]:
        """Run steps on the dummy page, and return the times of decode steps and of chunks.

        A CPU compiles no kernels. On a GPU, steps of every kind run first, so that no kernel
        compiles while serving. Steps of all sizes also run if there are no piecewise graphs, and
        the largest step if the configuration sets num_pages. Without num_pages the constructor has
        already run the largest step, to measure the memory for the KV pool. Raises OutOfMemory.
        """
        start, chunk = self._start, self._start.max_chunk_tokens
        drafting, on_cpu = start.drafting, start.device.type == "cpu"
        with memory.memory_of(start.device), self.startup.phase("warm_up"):
            if not on_cpu:
                warmup.warm_up(self, DRAFT_WIDTHS if drafting else DRAFT_WIDTHS[:1])
                with start.on_stream():
                    self._launcher.warm_up_masks()
            if not on_cpu and not self._launcher.graphs.pieces:
                warmup.run_every_size(self, chunk)
            if not on_cpu and start.config.num_pages is not None:
                warmup.run_largest(self, chunk, drafting)
            chunks = [min(chunk, most) for most in (_TIMED_CHUNKS_CPU if on_cpu else _TIMED_CHUNKS)]
            graphs = self._launcher.graphs.decode
            reqs = max((step.layout.reqs for step in graphs if step.columns.width == 1), default=1)
            timed = warmup.time_steps(self, warmup.timed_shapes(reqs, chunks, self.max_seq_len))
        start.compile_log.finish()
        with start.on_stream():
            self._launcher.runner.clear_dummy()
            self._synchronize()
        return timed

    def close(self) -> None:
        """Free the device's memory. The communicator stays open, because the caller owns it."""
        self._synchronize()
        if self._copies is not None:
            self._copies.close()
        del self._launcher, self.launch, self._copies, self.copier
        torch.cuda.empty_cache()  # does nothing in a process that has not used a GPU

    def _synchronize(self) -> None:
        if self._start.stream is not None:
            self._start.stream.synchronize()
