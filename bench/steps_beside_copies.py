"""Decode steps while pages are copied between the GPU and host memory, without a server.

The engine and its copies are those of a server. In each direction that a row names, two copies are
open at all times, so the link is never idle between two of them. No step reads the copied pages.
"""

import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.step import contexts_of, decode_batch
from minisgl.benchmark.floor import load_shape
from minisgl.benchmark.latency import Samples, describe
from minisgl.benchmark.models import SHAPES
from minisgl.core import EngineConfig
from minisgl.core.batch import Batch, Int32Array
from minisgl.core.page_copier import PageCopier
from minisgl.cost.floor import cost_of
from minisgl.distributed.comm import SingleCommunicator
from minisgl.engine import Engine
from minisgl.models.spec import ModelSpec

PAGE_SIZE = 16
_CONTEXT, _ROOM = 1024, 128  # tokens of a request at the first step, and those that it may get
_ROUND = 50  # steps, after which the requests begin again at their first contexts
_JOB_PAGES = 512  # of one copy
_OPEN = 2  # copies of a direction at a time
_WARM_UP = 20  # steps of each row that do not count
Row = dict[str, Any]


class Link:
    """Keeps copies open in one direction, always of the same pages and blocks."""

    def __init__(self, copier: PageCopier, pages: Int32Array, blocks: Int32Array, load: bool):
        """load: the copies go to the GPU. No other link of the copier may be open."""
        self._copier, self._pages, self._blocks, self._load = copier, pages, blocks, load
        self._numbers = count(int(load), 2)  # those of the two directions differ
        self._open: set[int] = set()
        self.ended = 0

    def advance(self, ended: Sequence[int]) -> None:
        """Finish the copies of this link among those that have ended, and start as many."""
        for job in self._open.intersection(ended):
            self._copier.finish(job)
            self._open.remove(job)
            self.ended += 1
        while len(self._open) < _OPEN:
            job = next(self._numbers)
            self._copier.start(job, self._pages, self._blocks, self._load)
            self._open.add(job)

    def close(self) -> None:
        """Wait for all copies."""
        for job in self._open:
            self._copier.finish(job)
        self._open.clear()


def host_gb(model: ModelSpec, pages: int) -> float:
    """Return the size of a host cache of `pages` pages, in GB, for one rank."""
    stored = 1 if torch.cuda.is_available() else 2  # a CPU stores float32 in place of bf16
    spare = 1  # page, because the number is rounded
    return stored * (pages + spare) * PAGE_SIZE * cost_of(model, 1, False).kv_bytes / 1e9


def timed_steps(
    engine: Engine, batches: Sequence[Batch], steps: int, links: Sequence[Link]
) -> Samples:
    """Return the seconds between the ends of `steps` successive steps, without those of a warm-up.

    The next step is always queued. The copies of `links` are open at all steps that count, and
    Link.ended counts those that ended during these steps.
    """
    ended_s: list[float] = []
    pending = None
    for number in range(_WARM_UP + steps + 1):
        launched = engine.launch(batches[number % len(batches)])
        if links:
            ended = [] if engine.copier is None else engine.copier.done(0.0)
            for link in links:
                link.advance(ended)
                if number == _WARM_UP:
                    link.ended = 0
        if pending is not None:
            pending.wait()
            ended_s.append(time.perf_counter())
        pending = launched
    if pending is not None:
        pending.wait()
    for link in links:
        link.close()
    return np.diff(ended_s)[_WARM_UP - 1 :]


def step_rows(model: str, num_reqs: int, steps: int) -> list[Row]:
    """Measure decode steps of `num_reqs` requests without copies, and with those of each direction.

    ratio: of the 99th percentiles of the step time with and without copies. to_host, to_gpu: GB/s.
    Raises ConfigError.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, spec = load_shape(model, Path(folder))
        config = EngineConfig(
            model_path=path,
            page_size=PAGE_SIZE,
            num_pages=num_reqs * (_CONTEXT + _ROOM) // PAGE_SIZE + 2 * _JOB_PAGES,
            max_running_reqs=num_reqs,
            max_seq_len=_CONTEXT + _ROOM,
            host_cache_gb=host_gb(spec, 2 * _JOB_PAGES),
            dummy_weight=model in SHAPES,
        )
        engine = Engine(config, SingleCommunicator())
    assert engine.copier is not None, "a host cache gives the engine a copier; this is a bug"
    engine.copier.start_opening()
    engine.copier.wait_open(2 * _JOB_PAGES)
    contexts = contexts_of(num_reqs, _CONTEXT, ragged=False)
    batches = [decode_batch(engine, contexts, number) for number in range(_ROUND)]
    pages = np.setdiff1d(np.arange(engine.num_pages), batches[0].page_updates.ids)
    halves = pages.astype(np.int32)[: 2 * _JOB_PAGES].reshape(2, _JOB_PAGES)
    blocks = np.arange(2 * _JOB_PAGES, dtype=np.int32).reshape(2, _JOB_PAGES)
    timed_steps(engine, batches, _ROUND, [])
    rows: list[Row] = []
    for name, loads in (("no copies", []), ("to host", [0]), ("to GPU", [1]), ("both", [0, 1])):
        links = [Link(engine.copier, halves[load], blocks[load], bool(load)) for load in loads]
        seconds = timed_steps(engine, batches, steps, links)
        found = describe(seconds)
        row: Row = {"name": f"step of {num_reqs} requests, {name}"}
        row |= {f"{key}_ms": 1e3 * found[key] for key in ("p50", "p99", "max")}
        row["ratio"] = row["p99_ms"] / (rows[0] if rows else row)["p99_ms"]
        for load, link in zip(loads, links, strict=True):
            moved = link.ended * _JOB_PAGES * engine.copier.block_bytes
            row["to_gpu" if load else "to_host"] = moved / seconds.sum() / 1e9
        rows.append(row)
    engine.close()
    return rows
