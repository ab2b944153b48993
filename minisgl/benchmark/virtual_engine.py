"""An engine in simulated time: each step advances a clock by the time that StepCost predicts."""

import argparse
import math
from typing import NamedTuple

import numpy as np

from minisgl.benchmark.flag_types import (
    flags,
    nonnegative_float,
    nonnegative_int,
    positive_float,
    positive_int,
)
from minisgl.core import ConfigError, SchedulerConfig, StepCost, StepWork
from minisgl.core.batch import Batch, Int32Array, StepResult, WindowLayers
from minisgl.core.images import ImageLimits
from minisgl.core.page_copier import PageCopier

_PAGE_SIZE = 16
_STATE_BYTES_PER_S = 1.5e12  # of a copy of states on the device, which reads and writes each byte
_HOST_S = 0.0003  # host time from the end of step n to the launch of step n + 2
# Qwen3-8B, bfloat16, on one H200, as a server of bbc8025 logged it (2026-11-22).
DEFAULT_COST = (
    "35.88,1.3053,1:3.983,8:4.093,16:4.261,32:4.261,64:4.338,128:5.989,256:8.043,384:9.934,"
    "512:12.351,640:16.739,768:18.039,1024:23.674,2048:44.901"
)


def read_cost(text: str) -> StepCost:
    """Parse the text of str(StepCost). Raises ConfigError."""
    try:
        key_ns, pair_ns, *prices = text.split(",")
        req_ns = prices.pop(0) if ":" not in prices[0] else "0"
        draft_ns = prices.pop(0) if ":" not in prices[0] else "0"
        points = [(int(tokens), float(ms) / 1e3) for tokens, ms in (p.split(":") for p in prices)]
        tokens, seconds = zip(*points, strict=True)
        figures = [float(key_ns), float(pair_ns), float(req_ns), float(draft_ns), *seconds]
        rising = [*tokens] == sorted({*tokens}) and [*seconds] == sorted(seconds)
        if not (rising and tokens[0] > 0 and all(0 <= each < math.inf for each in figures)):
            raise ValueError
        return StepCost(
            tokens=tokens,
            seconds=seconds,
            per_decode_key_s=float(key_ns) / 1e9,
            per_prefill_pair_s=float(pair_ns) / 1e9,
            per_decode_req_s=float(req_ns) / 1e9,
            per_draft_s=float(draft_ns) / 1e9,
        )
    except (ValueError, IndexError):
        raise ConfigError(
            f"--cost {text!r} does not have the form KEY_NS,PAIR_NS[,REQ_NS[,DRAFT_NS]],"
            "TOKENS:MS,..."
        ) from None


class _Pending:
    """Implements core.PendingStep. `wait` advances the simulated time to the end of the step."""

    def __init__(self, engine: "VirtualEngine", batch: Batch, end_s: float) -> None:
        self._engine = engine
        self._num_reqs = len(batch.rows)
        self._end_s = end_s

    def wait(self) -> StepResult:
        late = self.done()
        self._engine.now_s = max(self._engine.now_s, self._end_s) + _HOST_S
        ones = np.ones(self._num_reqs, dtype=np.int32)
        finite = np.ones(self._num_reqs, dtype=np.bool_)
        return StepResult(ones[:, None], ones, finite, late=late)

    def done(self) -> bool:
        return self._engine.now_s >= self._end_s


class HostMemory(NamedTuple):
    """The host memory of a simulated engine. page_bytes: of all layers."""

    num_blocks: int
    page_bytes: int
    link_bytes_per_s: float


_COPY_START_S = 0.001  # an iteration of the scheduler and the launches


class _Copier:
    """Implements core.PageCopier. Each direction has a link of its own."""

    def __init__(self, engine: "VirtualEngine", memory: HostMemory) -> None:
        self._engine, self._memory = engine, memory
        self.num_blocks = self.num_open = memory.num_blocks
        self.is_opening = False
        self.block_bytes = memory.page_bytes
        self._free_s = [0.0, 0.0]  # end of the last copy in each direction
        self._ends_s: dict[int, float] = {}
        self._reported: set[int] = set()

    def start_opening(self) -> None:
        """All blocks can be used."""

    def wait_open(self, count: int) -> None:
        """All blocks can be used."""

    def start(self, job: int, pages: Int32Array, blocks: Int32Array, load: bool) -> None:
        seconds = len(pages) * self._memory.page_bytes / self._memory.link_bytes_per_s
        begin_s = max(self._engine.now_s + _COPY_START_S, self._free_s[load])
        self._free_s[load] = self._ends_s[job] = begin_s + seconds

    def done(self, wait_s: float) -> list[int]:
        now_s = self._engine.now_s
        ends_s = {job: end for job, end in self._ends_s.items() if job not in self._reported}
        if ends_s and wait_s:
            self._engine.now_s = now_s = max(now_s, min(now_s + wait_s, *ends_s.values()))
        ended = [job for job, end_s in ends_s.items() if end_s <= now_s]
        self._reported.update(ended)
        return ended

    def finish(self, job: int) -> None:
        self._engine.now_s = max(self._engine.now_s, self._ends_s.pop(job))
        self._reported.discard(job)


class EngineSettings(NamedTuple):
    """A simulated engine, and the configuration of its scheduler.

    mixed_factor    factor for the times of steps that both decode and prefill.
    snapshot_pages, images
                    as in EngineLike.
    page_bytes      of all layers; a step takes the time of its copies of states.
    """

    cost: StepCost
    num_pages: int
    rows: int
    max_seq_len: int
    mixed_factor: float = 1.0
    config: SchedulerConfig = SchedulerConfig()
    snapshot_pages: int = 0
    page_bytes: int = 0
    host: HostMemory | None = None
    images: ImageLimits | None = None

    def engine(self) -> "VirtualEngine":
        return VirtualEngine(self)


class VirtualEngine:
    """Implements core.EngineLike.

    now_s: the simulated time. busy_s: the sum of the times of all steps. longest_s: their maximum.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._cost, self._mixed_factor = settings.cost, settings.mixed_factor
        self.num_pages = settings.num_pages
        self.page_size = _PAGE_SIZE
        self._page_copy_s = settings.page_bytes / _STATE_BYTES_PER_S
        self.window: WindowLayers | None = None
        self.snapshot_pages = settings.snapshot_pages
        host = settings.host
        self.copier: PageCopier | None = None if host is None else _Copier(self, host)
        self.images = settings.images
        self.max_running_reqs = settings.rows
        self.max_seq_len = settings.max_seq_len
        self.now_s = 0.0
        self.busy_s = 0.0
        self.longest_s = 0.0
        self._free_s = 0.0  # end of the last launched step

    def launch(self, batch: Batch) -> _Pending:
        lengths = batch.lengths.astype(np.int64)
        pairs = lengths * batch.start + lengths * (lengths + 1) // 2
        decode_keys = int((batch.start + lengths)[: batch.num_decode].sum())
        prefill_pairs = int(pairs[batch.num_decode :].sum())
        work = StepWork(int(lengths.sum()), decode_keys, prefill_pairs, batch.num_decode)
        seconds = self._cost.predict_s(work)
        if decode_keys and prefill_pairs:
            seconds *= self._mixed_factor
        if batch.states is not None:
            copied = batch.states.save_pages.size + batch.states.load_pages.size
            seconds += copied * self._page_copy_s
        if self.images is not None:
            price, large_s = self.images.price, self._cost.seconds[-1] / self._cost.tokens[-1]
            tokens = sum(price(i.grid, i.end) - price(i.grid, i.first) for i in batch.images)
            seconds += tokens * large_s
        self.busy_s += seconds
        self.longest_s = max(self.longest_s, seconds)
        self._free_s = max(self.now_s, self._free_s) + seconds
        return _Pending(self, batch, self._free_s)


def add_engine_flags(parser: argparse.ArgumentParser, mixed_factor: float = 1.0) -> None:
    """Add the flags that engine_settings reads. mixed_factor: its default."""
    parser.add_argument(
        "--cost",
        default=DEFAULT_COST,
        metavar="KEY_NS,PAIR_NS,TOKENS:MS,...",
        help="costs of a step, as a server logs them (Qwen3-8B on one H200)",
    )
    add, defaults = flags(parser), SchedulerConfig()
    add("--num-pages", positive_int, 49_000, "KV pages of 16 tokens")
    add(
        "--snapshot-pages",
        nonnegative_int,
        0,
        "KV pages of a copy of a request's recurrent states; 0: the model has none",
    )
    add(
        "--host-gb",
        nonnegative_float,
        0.0,
        "host memory for cached prefixes, in GB of 10^9 bytes; 0: none",
    )
    add(
        "--link-gb-s",
        positive_float,
        50.0,
        "GB per second between the GPU and host memory, in each direction",
    )
    add(
        "--token-bytes",
        positive_int,
        147_456,
        "bytes of the keys and values of one token; Qwen3-8B in bfloat16",
    )
    add("--max-running-requests", positive_int, 256, "requests in a batch")
    add("--max-seq-len", positive_int, 40_960, "context length in tokens")
    add(
        "--target-step-ms",
        nonnegative_float,
        defaults.target_step_ms,
        "step-time target, as in the server; 0: no target, as in the offline LLM",
    )
    add(
        "--max-slowdown",
        positive_float,
        defaults.max_slowdown,
        "a step with prompts takes at most this many times the step without, or the target, as in "
        "the server",
    )
    add("--cache-type", str, "radix", "prefix cache", choices=("radix", "naive"))
    add(
        "--mixed-factor",
        positive_float,
        mixed_factor,
        "factor for the times of steps that both decode and prefill",
    )


def engine_settings(options: argparse.Namespace) -> EngineSettings:
    """Return the settings that the flags describe. Raises ConfigError."""
    return EngineSettings(
        read_cost(options.cost),
        options.num_pages,
        options.max_running_requests,
        options.max_seq_len,
        options.mixed_factor,
        SchedulerConfig(
            target_step_ms=options.target_step_ms or None,
            max_slowdown=options.max_slowdown,
            cache_type=options.cache_type,
        ),
        options.snapshot_pages,
        _PAGE_SIZE * options.token_bytes,
        _host_memory(options, _PAGE_SIZE * options.token_bytes),
    )


def _host_memory(options: argparse.Namespace, page_bytes: int) -> HostMemory | None:
    num_blocks = int(options.host_gb * 1e9) // page_bytes
    return HostMemory(num_blocks, page_bytes, options.link_gb_s * 1e9) if num_blocks else None
