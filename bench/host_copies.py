"""Rates of the copies of KV pages between a GPU and host memory. `python -m bench.host_copies`.

Prints GB/s of 32k tokens of Qwen3-8B in each direction. Needs a CUDA device and 10 GB of memory.
"""

import sys
import time

import numpy as np
import torch

from minisgl.core.batch import Int32Array
from minisgl.engine.host_copies import HostPageCopier
from minisgl.kvcache.pool import KVPool, KVSpec


def main() -> None:
    """Measure runs of adjacent host blocks, and blocks that are not adjacent."""
    device = torch.device("cuda")
    spec = KVSpec(8, 128, torch.bfloat16)
    pool = KVPool(spec, layers=range(36), num_pages=2048, page_size=16, device=device)
    began_s = time.perf_counter()
    copies = HostPageCopier(pool, num_blocks=4096)
    sys.stdout.write(f"host memory of 9.7 GB locked in {time.perf_counter() - began_s:.2f} s\n")
    pages: Int32Array = np.arange(2048, dtype=np.int32)
    gigabytes = 2048 * 16 * 147_456 / 1e9
    for name, blocks in (("one run", pages), ("runs of one", 2 * pages)):
        for load in (False, True, False, True):
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            copies.start(1, pages, blocks.astype(np.int32), load)
            host_s = time.perf_counter() - began_s
            copies.finish(1)
            seconds = time.perf_counter() - began_s
            direction = "to the GPU" if load else "to the host"
            sys.stdout.write(
                f"{name}, {direction}: {gigabytes / seconds:.1f} GB/s, {host_s * 1e3:.1f} ms host\n"
            )
    copies.close()


if __name__ == "__main__":
    main()
