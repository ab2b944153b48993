"""Segments of torch's caching allocator on a GPU: one segment for all tensors of a run, a block.

torch takes one segment of the driver for each large tensor that fits into no free segment. It
splits free segments, but merges no two of them (CUDACachingAllocator.cpp of PyTorch 2). The tensors
of one kind of layer therefore leave segments that are too small for those of the next kind, and a
step can take 1.6 times the memory of its live tensors.
"""

from collections.abc import Callable

import torch

# The bytes of a block for each byte of live tensors. The rest is room for the gaps between them. In
# simulated steps of Qwen3.6-27B in int4 and Qwen3-8B and 14B, 0.1 is enough and 0.05 is not
# (bench/notebook/2026-11-28-third-runs.md).
BLOCK_SHARE = 1.1


def block_for(run: Callable[[], object], device: torch.device) -> int:
    """Call `run`, and return the bytes of a block for its tensors. Resets torch's peak counters.

    The tensors that outlive the run are among them. Returns 0 on other devices than a GPU.
    """
    if device.type != "cuda":
        run()
        return 0
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return int(BLOCK_SHARE * (torch.cuda.max_memory_allocated(device) - before))


def reserve_block(num_bytes: int, device: torch.device) -> None:
    """Make torch take one segment of this many bytes for later tensors, unless it has one.

    torch keeps the segment for tensors of the current stream. During a capture, it keeps the
    segment for all graphs that share memory with the new graph. Raises torch.OutOfMemoryError.
    """
    if num_bytes:
        torch.empty(num_bytes, dtype=torch.uint8, device=device)
