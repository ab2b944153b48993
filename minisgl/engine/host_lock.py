"""`HostMemoryLock`: lets the CUDA driver lock host memory, chunk by chunk, beside the steps.

A device can copy from and to locked memory directly. The driver needs 0.3 s to lock a GB, so this
happens after the start. Copies from and to memory that is not locked are correct as well, but the
driver stages them: they are slower, and the launch of a copy waits for it.
"""

import logging
import math
import mmap
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from minisgl.core import EngineError

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 128 * 2**20  # the driver may delay a launch while it locks a chunk


def chunk_blocks(blocks: Tensor) -> int:
    """Return the number of blocks in a chunk of this memory, [N, ...].

    A chunk is whole pages of the machine, because the driver locks no page twice.
    """
    block_bytes = blocks[:1].nbytes
    unit = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, block_bytes)
    return max(_CHUNK_BYTES // (unit * block_bytes), 1) * unit


class HostMemoryLock:
    """Locks host memory in a thread of its own.

    num_open   the number of the first blocks that are locked in each part.
    has_ended  num_open does not change any more.

    If the driver refuses a chunk, the thread ends and the rest stays unlocked. Rank 0 uses the
    locked blocks only. Other ranks use as many blocks as rank 0.
    """

    def __init__(self, parts: Sequence[Tensor], device: torch.device) -> None:
        """parts: [N, ...] each, in host memory."""
        self._parts, self._device = parts, device
        self.num_open = 0
        self._chunks: list[Tensor] = []  # the locked ones
        self._changed = threading.Condition()
        self._ends, self.has_ended = False, False
        self._thread = threading.Thread(target=self._run, name="host-memory-lock", daemon=True)

    def start(self) -> None:
        """Begin to lock the memory. The caller calls this once."""
        self._thread.start()

    def wait(self, count: int) -> None:
        """Wait until the first `count` blocks are locked, or until the thread has ended.

        From then on the thread writes to none of these blocks, so copies may use them.
        """
        assert self._thread.ident is not None, "no thread locks the memory; this is a bug"
        with self._changed:
            self._changed.wait_for(lambda: self.num_open >= count or self.has_ended)

    def close(self) -> None:
        """Unlock the memory. Raises EngineError if the driver refuses this."""
        self._ends = True
        if self._thread.ident is not None:
            self._thread.join()
        while self._chunks:
            change_lock("cudaHostUnregister", self._chunks.pop().data_ptr())

    def _run(self) -> None:
        total = len(self._parts[0])
        try:
            with torch.cuda.device(self._device):
                self._lock_all(total)
        # The driver refuses by an EngineError, and torch by the others.
        except (EngineError, RuntimeError, MemoryError) as error:
            log = "%d of %d blocks of the host cache are locked: %s; set a smaller host cache"
            logger.warning(log, self.num_open, total, error)
        finally:
            with self._changed:
                self.has_ended = True
                self._changed.notify_all()

    def _lock_all(self, total: int) -> None:
        """Lock all parts in equal shares: copies use the same blocks of each part."""
        ends = [0 for _ in self._parts]
        while min(ends) < total and not self._ends:
            index = ends.index(min(ends))
            part = self._parts[index]
            chunk = part[ends[index] : ends[index] + chunk_blocks(part)]
            chunk.zero_()  # the kernel then has its pages, which shortens the lock
            change_lock("cudaHostRegister", chunk.data_ptr(), chunk.nbytes, 0)
            self._chunks.append(chunk)
            ends[index] += len(chunk)
            with self._changed:
                self.num_open = min(ends)
                self._changed.notify_all()


def change_lock(function: str, *args: int) -> None:
    """Call a function of the CUDA driver that locks or unlocks memory. Raises EngineError."""
    driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = int(getattr(driver, function)(*args))
    if status != 0:
        raise EngineError(f"the CUDA driver refuses {function} of the host cache (error {status})")
