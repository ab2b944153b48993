"""Rates of the copies of KV pages between a GPU and host memory, of 32k tokens of Qwen3-8B.

It needs 10 GB of host memory.
"""

import argparse
import json
import time
from collections.abc import Sequence

import numpy as np
import torch

from minisgl.benchmark.text_table import TextTable
from minisgl.core.batch import Int32Array
from minisgl.engine.host_copies import HostPageCopier
from minisgl.kvcache.pool import KVPool, KVSpec


def main(argv: Sequence[str]) -> int:
    """Measure runs of adjacent host blocks, and blocks that are not adjacent."""
    parser = argparse.ArgumentParser(prog="python -m bench host_copies", description=__doc__)
    parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    device = torch.device("cuda")
    spec = KVSpec(8, 128, torch.bfloat16)
    pool = KVPool(spec, layers=range(36), num_pages=2048, page_size=16, device=device)
    began_s = time.perf_counter()
    copies = HostPageCopier(pool, num_blocks=4096)
    copies.start_opening()
    copies.wait_open(4096)
    print(f"host memory of 9.7 GB locked in {time.perf_counter() - began_s:.2f} s")
    pages: Int32Array = np.arange(2048, dtype=np.int32)
    gigabytes = 2048 * 16 * 147_456 / 1e9
    table = TextTable({"copy": "<32", "GB/s": ">8.1f", "ms of start": ">11.1f"})
    print(table.head)
    rows = []
    for name, blocks in (("one run", pages), ("runs of one", 2 * pages)):
        for load in (False, True, False, True):
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            copies.start(1, pages, blocks.astype(np.int32), load)
            start_s = time.perf_counter() - began_s
            copies.finish(1)
            rate = gigabytes / (time.perf_counter() - began_s)
            direction = "to the GPU" if load else "to the host"
            rows.append((f"{name}, {direction}", rate, 1e3 * start_s))
            print(table.row(*rows[-1]), flush=True)
    copies.close()
    print(json.dumps({"rows": rows}))
    return 0
