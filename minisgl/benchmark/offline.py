"""Throughput of the offline engine on a fixed workload, as a fraction of the floor."""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minisgl.benchmark.flag_types import (
    add_model_flags,
    flags,
    nonnegative_float,
    nonnegative_int,
    positive_int,
)
from minisgl.benchmark.floor import floor_of, load_shape
from minisgl.benchmark.models import SHAPES
from minisgl.benchmark.outbox import workload_error
from minisgl.benchmark.text_table import TextTable
from minisgl.benchmark.trace import Load
from minisgl.benchmark.workload import add_workload_flags, workload_from
from minisgl.core import ConfigError, InvalidRequest, SamplingParams
from minisgl.core.config import DRAFT_METHODS
from minisgl.cost.floor import Ceilings
from minisgl.llm import LLM


def run_workload(llm: LLM, workload: Load, temperature: float) -> float:
    """Run the workload and return its seconds. Raises ConfigError when a prompt is refused."""
    sampling = [
        SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True, seed=index)
        for index, count in enumerate(workload.max_tokens)
    ]
    prompts = [prompt.tolist() for prompt in workload.prompts]
    begin = time.perf_counter()
    try:
        completions = llm.generate(prompts, sampling, progress=True)
    except InvalidRequest as error:
        raise ConfigError(error.message) from None
    seconds = time.perf_counter() - begin
    assert isinstance(completions, list), "a list of prompts must give a list; this is a bug"
    refused = next((completion.error for completion in completions if completion.error), None)
    if refused is not None:
        raise workload_error(refused)
    generated = [len(completion.token_ids) for completion in completions]
    assert generated == workload.max_tokens, "each request must give all its tokens; this is a bug"
    return seconds


def main(argv: Sequence[str]) -> int:
    """Print a table and one line of JSON."""
    parser = argparse.ArgumentParser(prog="minisgl bench offline", description=__doc__)
    further = "--page-size", "--tp", "--quantization", "--kv-cache-dtype", "--device"
    add_model_flags(parser, "qwen3-0.6b", *further)
    add_workload_flags(parser)
    add = flags(parser, "run")
    add("--temperature", nonnegative_float, 0.6, "sampling temperature")
    add("--attention-backend", str, "auto", "as in the server")
    add("--max-prefill-length", positive_int, 8192, "prompt tokens per step")
    add("--max-running-requests", positive_int, 256, "requests in a batch")
    add("--cuda-graph-max-bs", nonnegative_int, None, "as in the server")
    add("--repeat", positive_int, 2, "timed runs, after a warm-up run")
    add("--speculative", str, None, "drafts, as in the server (none)", choices=DRAFT_METHODS)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        path, config = load_shape(options.model, Path(folder))
        workload = workload_from(options, config.vocab_size)
        begin = time.perf_counter()
        llm = LLM(
            path,
            dummy_weight=options.model in SHAPES,
            device=options.device,
            tp=options.tp,
            page_size=options.page_size,
            quantization=options.quantization,
            kv_cache_dtype=options.kv_cache_dtype,
            speculative=options.speculative,
            attention_backend=options.attention_backend,
            max_running_reqs=options.max_running_requests,
            cuda_graph_max_bs=options.cuda_graph_max_bs,
            prefill_budget_tokens=options.max_prefill_length,
            # Without a prefix cache, every run computes all prompts.
            cache_type="radix" if options.shared_prefix else "naive",
        )
        ready_s = time.perf_counter() - begin
    quantization, fp8_kv = options.quantization, options.kv_cache_dtype == "fp8"
    budget = options.max_prefill_length
    floor = floor_of(config, workload, Ceilings(), budget, options.tp, quantization, fp8_kv)
    outputs = sum(workload.max_tokens)
    print(f"{options.model}: ready in {ready_s:.1f} s; floor {floor.total_s:.2f} s")
    table = TextTable(
        {"run": "<8", "seconds": ">8.2f", "tokens/s": ">10,.0f", "of the floor": ">13.1%"}
    )
    print(table.head)
    runs: list[dict[str, Any]] = []
    with llm:
        short = Load(workload.prompts[:8], [8] * len(workload.prompts[:8]))
        run_workload(llm, short, options.temperature)
        for index in range(options.repeat):
            seconds = run_workload(llm, workload, options.temperature)
            rate, fraction = outputs / seconds, floor.total_s / seconds
            print(table.row(index + 1, seconds, rate, fraction), flush=True)
            runs.append({"seconds": seconds, "tokens_per_s": rate, "of_floor": fraction})
    prompt_tokens = int(workload.prompt_lengths.sum())
    summary = {"model": options.model, "ready_s": ready_s, "floor_s": floor.total_s}
    summary |= {"quantization": quantization, "kv_cache_dtype": options.kv_cache_dtype}
    summary |= {"speculative": options.speculative}
    totals = {"prompt_tokens": prompt_tokens, "output_tokens": outputs}
    print(json.dumps({**summary, **totals, "runs": runs}))
    return 0
