"""One decode step, or the step of one prompt: its time, and the time of each kernel."""

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from bench.reduce import run_ranks
from minisgl.benchmark.flag_types import (
    add_model_flags,
    nonnegative_int,
    positive_int,
)
from minisgl.benchmark.floor import load_shape
from minisgl.benchmark.models import SHAPES
from minisgl.benchmark.text_table import TextTable
from minisgl.core import ConfigError, EngineConfig, SamplingParams
from minisgl.core.batch import Batch, Int32Array, PageUpdates
from minisgl.core.columns import sampling_arrays
from minisgl.core.config import DRAFT_WIDTHS
from minisgl.cost.floor import Ceilings, cost_of, read_keys, reduce_s, with_weights
from minisgl.distributed.comm import Communicator, SingleCommunicator
from minisgl.drafts import with_speculation
from minisgl.engine import Engine
from minisgl.models.build import stored_weights
from minisgl.models.spec import ModelSpec
from minisgl.quantization import with_quantizations

_WARM_UP, _STEPS, _PROFILED = 5, 50, 4
_LARGEST_GRAPH = 256
_CHUNK = 8192  # prompt tokens for which the engine reserves memory


class KernelTime(NamedTuple):
    """A kernel's calls in one step, and the microseconds of all of them."""

    name: str
    calls: float
    microseconds: float


def contexts_of(num_reqs: int, context: int, ragged: bool) -> Int32Array:
    """Return the context of each request, int32: `context`, or evenly from 0.5 to 1.5 times it."""
    spread = context // 2 if ragged else 0
    return np.linspace(context - spread, context + spread, num_reqs).astype(np.int32)


def decode_batch(
    engine: Engine,
    contexts: Int32Array,
    step: int,
    drafts: int | None = None,
    by_head: bool = False,
) -> Batch:
    """Return decode step `step` of requests that started with `contexts` and share no page.

    drafts: draft tokens of each request; None: the engine makes no drafts. The requests may accept
    all of them. Only the first step sets the number of cached tokens.
    by_head: the draft head makes as many drafts for the next step.
    """
    width = 1 + (drafts or 0)
    drafting, made = drafts is not None and step > 0, width - 1 if by_head else 0
    num_reqs, steps = len(contexts), (_WARM_UP + _STEPS + _PROFILED) * width
    if contexts.max() + steps > engine.max_seq_len:
        limit = engine.max_seq_len - steps
        raise ConfigError(f"a context of {contexts.max()} tokens is too long; the limit is {limit}")
    pages = -(-(contexts + (steps + 1)) // engine.page_size)
    if pages.sum() > engine.num_pages:
        raise ConfigError(f"{pages.sum()} KV pages are needed, but the pool has {engine.num_pages}")
    rows = np.arange(num_reqs, dtype=np.int32)
    order = np.random.default_rng(0).permutation(engine.num_pages)[: pages.sum()]
    empty = np.zeros(0, dtype=np.int32)
    updates = PageUpdates(empty, empty, empty)
    if step == 0:
        cols = np.concatenate([np.arange(count, dtype=np.int32) for count in pages])
        updates = _updates(engine, np.repeat(rows, pages), cols, order.astype(np.int32))
    params = [SamplingParams(temperature=0.6, seed=seed) for seed in range(num_reqs)]
    return Batch(
        step_id=step,
        num_decode=num_reqs,
        rows=rows,
        start=contexts + np.int32(step * width),
        lengths=np.full(num_reqs, width, dtype=np.int32),
        samples=np.ones(num_reqs, dtype=np.bool_),
        chunk_ids=empty,
        page_updates=updates,
        sampling=sampling_arrays(params),
        drafting=drafting,
        next_drafts=made,
        made=np.full(num_reqs, made, dtype=np.int32) if drafting else None,
    )


def prompt_batch(engine: Engine, tokens: int, step: int) -> Batch:
    """Return step `step`: a prompt of `tokens` tokens, always in the same row and pages."""
    pages = np.arange(-(-tokens // engine.page_size), dtype=np.int32)
    empty = np.zeros(0, dtype=np.int32)
    updates = PageUpdates(empty, empty, empty)
    if step == 0:
        updates = _updates(engine, np.zeros_like(pages), pages, pages)
    return Batch(
        step_id=step,
        num_decode=0,
        rows=np.zeros(1, dtype=np.int32),
        start=np.zeros(1, dtype=np.int32),
        lengths=np.array([tokens], dtype=np.int32),
        samples=np.ones(1, dtype=np.bool_),
        chunk_ids=np.random.default_rng(step).integers(0, 10_000, tokens, dtype=np.int32),
        page_updates=updates,
        sampling=sampling_arrays([SamplingParams(temperature=0.6, seed=0)]),
    )


def _updates(engine: Engine, rows: Int32Array, cols: Int32Array, pages: Int32Array) -> PageUpdates:
    updates = PageUpdates(rows, cols, pages)
    if engine.window is None:
        return updates
    below = rows + np.int32(engine.max_running_reqs + 1)
    again = np.arange(len(cols), dtype=np.int32) % engine.window.num_pages  # as in a long context
    return PageUpdates(*map(np.concatenate, zip(updates, (below, cols, again), strict=True)))


def run_steps(engine: Engine, batches: Sequence[Batch]) -> tuple[float, float]:
    """Return the mean seconds of a step while the next is queued, and the median of a launch."""
    launches: list[float] = []
    begin = time.perf_counter()
    pending = None
    for batch in batches:
        before = time.perf_counter()
        launched = engine.launch(batch)
        launches.append(time.perf_counter() - before)
        if pending is not None:
            pending.wait()
        pending = launched
    if pending is not None:
        pending.wait()
    return (time.perf_counter() - begin) / len(batches), statistics.median(launches)


def kernel_times(engine: Engine, batches: Sequence[Batch]) -> list[KernelTime]:
    """Return the GPU kernels and copies of one step, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run_steps(engine, batches)
    calls: dict[str, int] = defaultdict(int)
    total: dict[str, float] = defaultdict(float)
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA":
            calls[event.name] += 1
            total[event.name] += event.device_time
    steps = len(batches)
    times = [KernelTime(name, calls[name] / steps, total[name] / steps) for name in total]
    return sorted(times, key=lambda time: -time.microseconds)


def main(argv: Sequence[str]) -> int:
    """Print the step's times, its kernels and one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench step", description=__doc__)
    further = "--page-size", "--tp", "--quantization", "--kv-cache-dtype", "--device"
    add_model_flags(parser, "qwen3-0.6b", *further)
    parser.add_argument("--batch", type=positive_int, default=256, help="decoding requests (256)")
    parser.add_argument(
        "--context",
        type=nonnegative_int,
        default=1024,
        help="tokens of context of each request (1024)",
    )
    parser.add_argument(
        "--ragged", action="store_true", help="contexts from 0.5 to 1.5 times --context"
    )
    parser.add_argument(
        "--prompt",
        type=positive_int,
        help="profile the step of a prompt of this many tokens in place of a decode step",
    )
    parser.add_argument(
        "--kernels", type=nonnegative_int, default=25, help="kernels in the table (25)"
    )
    parser.add_argument(
        "--drafts",
        type=int,
        choices=[width - 1 for width in DRAFT_WIDTHS],
        help="draft tokens that the step forwards for each request; 0: an engine with "
        "--speculative that forwards none; without this flag, an engine without --speculative",
    )
    parser.add_argument(
        "--speculative",
        default="ngram",
        choices=("ngram", "mtp"),
        help="with --drafts: drafts of repetitions, or of the draft head of the model (ngram)",
    )
    options = parser.parse_args(argv)
    if options.tp > max(torch.cuda.device_count(), 1):
        parser.error(f"this benchmark needs {options.tp} CUDA devices")
    with tempfile.TemporaryDirectory() as folder:
        if options.tp == 1:
            profile_rank(SingleCommunicator(), options, folder)
            return 0
        return run_ranks(options.tp, folder, profile_rank, options, folder)


def profile_rank(comm: Communicator, options: argparse.Namespace, folder: str) -> None:
    """Run the benchmark on one rank. Rank 0 prints."""
    model_folder = Path(folder) / str(comm.tp.rank)
    path, model = load_shape(options.model, model_folder)
    room = 128 * (1 + (options.drafts or 0))  # tokens that a request may get
    pages = options.batch * -(-(options.context + room) // options.page_size)
    if options.prompt is not None:
        pages = -(-(options.prompt + 1) // options.page_size)
    config = EngineConfig(
        model_path=path,
        device=options.device,
        tp_size=comm.tp.size,
        page_size=options.page_size,
        kv_cache_dtype=options.kv_cache_dtype,
        num_pages=pages,
        max_running_reqs=max(options.batch, _LARGEST_GRAPH),  # the batch is padded as in a server
        quantization=options.quantization,
        dummy_weight=options.model in SHAPES,
        speculative=None if options.drafts is None else options.speculative,
    )
    method = None if options.drafts is None else options.speculative
    extensions = with_speculation(method, with_quantizations())
    engine = Engine(config, comm, options.prompt or _CHUNK, extensions)
    total = _WARM_UP + _STEPS + _PROFILED
    contexts = contexts_of(options.batch, options.context, options.ragged)
    if options.prompt is None:
        by_head = method == "mtp"
        batches = [decode_batch(engine, contexts, i, options.drafts, by_head) for i in range(total)]
    else:
        batches = [prompt_batch(engine, options.prompt, i) for i in range(total)]
    run_steps(engine, batches[:_WARM_UP])
    step_s, launch_s = run_steps(engine, batches[_WARM_UP : _WARM_UP + _STEPS])
    kernels: list[KernelTime] = []
    if torch.cuda.is_available():
        kernels = kernel_times(engine, batches[_WARM_UP + _STEPS :])
    if comm.tp.rank == 0:
        report(options, model, step_s, launch_s, kernels)
    engine.close()


def report(
    options: argparse.Namespace,
    model: ModelSpec,
    step_s: float,
    launch_s: float,
    kernels: list[KernelTime],
) -> None:
    """Print the results."""
    cost = cost_of(model, options.tp, options.kv_cache_dtype == "fp8")
    stored = stored_weights(model, options.quantization, with_quantizations())
    cost = with_weights(cost, model, stored, options.tp)
    contexts = contexts_of(options.batch, options.context, options.ragged)
    read, tokens, of_states = read_keys(model, contexts), options.batch, options.batch
    title = f"{options.batch} requests at {options.context} tokens of context"
    if options.prompt is not None:  # its attention and its states are not part of the floor
        read, tokens, of_states, title = 0.0, options.prompt, 0, f"a prompt of {options.prompt}"
    ceilings = Ceilings()
    times = {
        "weights": cost.read_bytes(tokens) / ceilings.bytes_per_s,
        "arithmetic": tokens * ceilings.arithmetic_s(cost.operations, cost.fp8_operations),
        "KV": read * cost.kv_bytes / ceilings.bytes_per_s,
        "states": of_states * cost.state_bytes / ceilings.bytes_per_s,
        "all-reduce": cost.reduces * reduce_s(options.tp, tokens * cost.reduce_bytes),
    }
    floor_s = sum(times.values()) - min(times["weights"], times["arithmetic"])
    print(f"{options.model}, {title}, {options.tp} GPUs")
    parts = ", ".join(f"{name} {seconds * 1e6:,.0f} µs" for name, seconds in times.items())
    print(
        f"step {step_s * 1e6:,.0f} µs, launch {launch_s * 1e6:,.0f} µs of CPU time; floor "
        f"{floor_s * 1e6:,.0f} µs ({floor_s / step_s:.1%}): {parts}"
    )
    if options.drafts is not None:
        least, most = options.batch / step_s, options.batch * (1 + options.drafts) / step_s
        print(f"{least:,.0f} tokens/s if no draft is accepted, {most:,.0f} if all are")
    if kernels:
        table = TextTable({"kernel": "<72", "calls": ">7.1f", "µs/step": ">9.1f"})
        busy = sum(kernel.microseconds for kernel in kernels)
        print(table.head)
        for name, calls, microseconds in kernels[: options.kernels]:
            print(table.row(name[:72], calls, microseconds))
        print(table.row("all kernels and copies", "", busy))
    summary = {"model": options.model, "batch": options.batch, "context": options.context}
    summary |= {"prompt": options.prompt}
    summary |= {"quantization": options.quantization, "drafts": options.drafts}
    summary |= {"speculative": options.speculative}
    totals = {"tp": options.tp, "step_s": step_s, "launch_s": launch_s, "floor_s": floor_s}
    found = {"kv_cache_dtype": options.kv_cache_dtype, "kernels": [k._asdict() for k in kernels]}
    print(json.dumps({**summary, **totals, **found}))
