"""`HostPageCopier`: copies KV pages between the device and host memory, beside the steps.

A block of host memory holds one page: the keys, the values and, of an FP8 pool, the scales of all
layers. On a GPU, a copy runs on a stream of its own: the pages are gathered into contiguous blocks
on the device, and each run of consecutive blocks crosses the link in one transfer.

A thread of each direction launches the copies, a few pieces ahead. When the scheduler launched all
pieces itself, a load and a store of 32,000 tokens stopped the steps of an H200 for 57 ms.
"""

import itertools
import mmap
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.core import ConfigError, EngineConfig
from minisgl.core.batch import Int32Array
from minisgl.distributed.comm import Communicator
from minisgl.engine.host_lock import HostMemoryLock, chunk_blocks
from minisgl.kvcache.pool import KVPool, kv_page_bytes
from minisgl.utils.host_memory import cpu_free_bytes

_SPARE_BYTES = 4 * 10**9  # of host memory, for all other data of the server
_PIECE_BYTES = 64 * 2**20  # of a copy in one direction: its blocks take this memory on the device
_AHEAD = 8  # the most pieces of a direction that are launched and have not ended


class HostPageCopier:
    """Implements core.PageCopier. num_blocks: the same number on every rank.

    The scheduler starts a store after the step that wrote its pages, and a load on pages that no
    step in flight uses (HostTier). So a copy waits for no step. A step that reads loaded pages is
    launched after `finish`.
    """

    def __init__(self, pool: KVPool, num_blocks: int) -> None:
        """Allocate `device_bytes` or less on the device, and reserve the host memory.

        On a GPU, `start_opening` starts a thread that lets the driver lock the host memory, at
        0.3 s for each GB.
        """
        self.num_blocks = num_blocks
        # [P + 1, n, ...] of the pool, and [num_blocks, n, ...] of host memory.
        self._pages = [part.transpose(0, 1) for part in pool.parts()]
        self._blocks = [_reserve(pages, num_blocks) for pages in self._pages]
        self._device = pool.device
        self._streams: list[torch.cuda.Stream] = []
        self._threads: list[ThreadPoolExecutor] = []
        self._locking: HostMemoryLock | None = None
        if self._device.type == "cuda":
            self._streams = [_stream(self._device) for _ in range(2)]
            self._threads = [ThreadPoolExecutor(1, "host-copies") for _ in range(2)]
            self._locking = HostMemoryLock(self._blocks, self._device)
        self.block_bytes = sum(blocks[:1].nbytes for blocks in self._blocks)
        self._piece = min(max(_PIECE_BYTES // self.block_bytes, 1), num_blocks)
        # By direction and part. Copies in one direction take place one after the other.
        self._staging = [self._allocate_staging(load) for load in (False, True)]
        self._jobs: dict[int, Future[torch.cuda.Event] | None] = {}
        self._reported: set[int] = set()

    def start(self, job: int, pages: Int32Array, blocks: Int32Array, load: bool) -> None:
        """As in PageCopier. On a CPU the copy is complete when this method returns."""
        if self._threads:
            self._jobs[job] = self._threads[load].submit(self._launch, pages, blocks, load)
        else:
            of_pages, in_order = _in_order(pages, blocks)
            for piece in self._pieces(len(in_order)):
                self._copy(of_pages[piece], in_order[piece], load)
            self._jobs[job] = None

    def _launch(self, pages: Int32Array, blocks: Int32Array, load: bool) -> torch.cuda.Event:
        """Launch a copy on the stream of its direction. Returns the event of its end."""
        # A new thread has GPU 0, and the end of `stream` alone would return to it: the driver would
        # then take memory there for this rank.
        with torch.cuda.device(self._device), torch.cuda.stream(self._streams[load]):
            of_pages, in_order = _in_order(pages, blocks)
            on_device = of_pages.pin_memory().to(self._device, non_blocking=True)
            open_pieces: deque[torch.cuda.Event] = deque()
            for piece in self._pieces(len(in_order)):
                if len(open_pieces) == _AHEAD:
                    open_pieces.popleft().synchronize()
                self._copy(on_device[piece], in_order[piece], load)
                event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                event.record()
                open_pieces.append(event)
        return open_pieces[-1]

    @property
    def num_open(self) -> int:
        """As in PageCopier."""
        return self.num_blocks if self._locking is None else self._locking.num_open

    def start_opening(self) -> None:
        """As in PageCopier."""
        if self._locking is not None:
            self._locking.start()

    @property
    def is_opening(self) -> bool:
        """As in PageCopier."""
        return self._locking is not None and not self._locking.has_ended

    def wait_open(self, count: int) -> None:
        """As in PageCopier. Copies of blocks that the driver refuses to lock are slower."""
        if self._locking is not None:
            self._locking.wait(count)

    def done(self, wait_s: float) -> list[int]:
        """As in PageCopier."""
        news = {job: launch for job, launch in self._jobs.items() if job not in self._reported}
        ended = [job for job, launch in news.items() if _is_done(launch)]
        if news and not ended and wait_s:
            time.sleep(wait_s)
            ended = [job for job, launch in news.items() if _is_done(launch)]
        self._reported.update(ended)
        return ended

    def finish(self, job: int) -> None:
        """As in PageCopier."""
        launch = self._jobs.pop(job)
        self._reported.discard(job)
        if launch is not None:
            launch.result().synchronize()

    def close(self) -> None:
        """Wait for the copies in flight, and let the driver unlock the host memory.

        Raises EngineError if the driver refuses this.
        """
        for thread in self._threads:
            thread.shutdown()
        for stream in self._streams:
            stream.synchronize()
        self._streams = []
        if self._locking is not None:
            self._locking.close()

    def _allocate_staging(self, load: bool) -> list[Tensor]:
        """Allocate the memory of a piece on the device: [piece, ...] for each part of the pool.

        On the stream of the steps, torch would take it from the block of the steps (segments.py).
        """
        of_direction = torch.cuda.stream(self._streams[load]) if self._streams else nullcontext()
        with of_direction:
            return [
                torch.empty((self._piece, *pages.shape[1:]), dtype=pages.dtype, device=self._device)
                for pages in self._pages
            ]

    def _pieces(self, count: int) -> list[slice]:
        return [slice(first, first + self._piece) for first in range(0, count, self._piece)]

    @torch.inference_mode()
    def _copy(self, pages: Tensor, blocks: Any, load: bool) -> None:
        """Copy a piece. pages, blocks: int64 [n]; the pages are on the device."""
        parts = zip(self._pages, self._blocks, self._staging[load], strict=True)
        for on_device, on_host, staging in parts:
            _copy_piece(on_device, on_host, staging[: len(blocks)], pages, blocks, load)


def _copy_piece(
    on_device: Tensor, on_host: Tensor, staging: Tensor, pages: Tensor, blocks: Any, load: bool
) -> None:
    """Copy pages of one part of the pool. staging: [n, ...] on the device, one for each page."""
    if not load:
        torch.index_select(on_device, 0, pages, out=staging)
    # A transfer stays within one chunk of locked memory.
    chunks = blocks // chunk_blocks(on_host)
    ends = np.flatnonzero((np.diff(blocks) != 1) | (np.diff(chunks) != 0)) + 1
    bounds = [0, *ends.tolist(), len(blocks)]
    for begin, end in itertools.pairwise(bounds):
        there = on_host[int(blocks[begin]) : int(blocks[begin]) + end - begin]
        here = staging[begin:end]
        source, target = (there, here) if load else (here, there)
        target.copy_(source, non_blocking=True)
    if load:
        on_device.index_copy_(0, pages, staging)


def check_host_cache(config: EngineConfig, kinds: Sequence[object]) -> None:
    """Raise ConfigError for a host cache beside further kinds of memory, which it does not hold.

    kinds: Extensions.cache_kinds.
    """
    if config.host_cache_gb and kinds:
        raise ConfigError(
            f"host_cache_gb {config.host_cache_gb:g}: the host cache does not hold the memory of "
            "the kinds of the extensions; set it to 0"
        )


def device_bytes(config: EngineConfig) -> int:
    """Return the memory that the copies of this configuration take on a GPU, in bytes."""
    return 2 * _PIECE_BYTES if config.host_cache_gb else 0


def host_copies(
    config: EngineConfig, comm: Communicator, pools: Sequence[KVPool]
) -> HostPageCopier | None:
    """Return the copies between the KV pool and the host cache of the configuration.

    All ranks call it. pools: of this rank; the first is that of full attention. Returns None
    without a host cache. Raises ConfigError if the host has too little memory.
    """
    needed = int(config.host_cache_gb * 1e9)
    if not needed:
        return None
    free = comm.agree_min(cpu_free_bytes())  # every rank measures before one of them allocates
    if needed + min(needed, _SPARE_BYTES) > free:
        raise ConfigError(
            f"host_cache_gb {config.host_cache_gb:g} does not fit beside other data into the "
            f"{free / 1e9:.1f} GB of free host memory; set a smaller value, or raise the memory "
            "limit of the container"
        )
    pool = pools[0]
    page_bytes = kv_page_bytes(pool.spec, len(pool.layers), pool.page_size)
    num_blocks = needed // comm.tp.size // page_bytes
    if not num_blocks:
        raise ConfigError(
            f"host_cache_gb {config.host_cache_gb:g} holds no KV page of {page_bytes:,} bytes on "
            "each rank; set a larger value, or 0"
        )
    return HostPageCopier(pool, num_blocks)


def _reserve(pages: Tensor, num_blocks: int) -> Tensor:
    """Return host memory for `num_blocks` rows of `pages`. It begins at a page of the machine."""
    memory = mmap.mmap(-1, num_blocks * pages[:1].nbytes)
    return torch.frombuffer(memory, dtype=pages.dtype).view(num_blocks, *pages.shape[1:])


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _in_order(pages: Int32Array, blocks: Int32Array) -> tuple[Tensor, Any]:
    """Return both as int64, in the order of the blocks."""
    order = np.argsort(blocks)
    return torch.from_numpy(pages[order].astype(np.int64)), blocks[order].astype(np.int64)


def _is_done(launch: Future[torch.cuda.Event] | None) -> bool:
    """Return whether a copy has ended. Raises the error of its launch."""
    if launch is None:
        return True
    return launch.done() and bool(launch.result().query())  # type: ignore[no-untyped-call]
