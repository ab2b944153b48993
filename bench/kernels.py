"""Time of each GPU kernel in a CUDA graph, and the time to move its bytes at copy bandwidth.

Successive calls use different sets of inputs, which together exceed the L2 cache. The gaps between
the kernels of a graph, about 1 us, are part of the times.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bench.kernel_cases.attention import attention_cases
from bench.kernel_cases.delta import delta_cases
from bench.kernel_cases.drafts import draft_cases
from bench.kernel_cases.experts import gpt_oss_cases, layer_cases
from bench.kernel_cases.packed import packed_cases
from bench.kernel_cases.paged import paged_cases
from bench.kernel_cases.scan import scan_cases
from bench.timer import graph_seconds
from minisgl.benchmark.flag_types import positive_int
from minisgl.benchmark.text_table import TextTable
from minisgl.kernel import dispatch
from minisgl.kernel.elementwise import PendingNorm
from minisgl.kernel.fp8_products import fp8_add_linear, fp8_linear
from minisgl.kernel.fp8_weights import FP8, Scales
from minisgl.kernel.sampling import SamplingTensors
from minisgl.kernel.step import StepLayout
from minisgl.utils.startup import Progress

_ROTATED_BYTES = 256 << 20
_VOCAB = 151_936
_HIDDEN_SIZES = {  # widths of hidden states, of queries, of queries with keys and values, of MLP
    "Qwen3-0.6B": (1024, 2048, 4096, 3072),
    "Qwen3-8B": (4096, 4096, 6144, 12288),
    "Qwen3-14B": (5120, 5120, 7168, 17408),
}


class Case(NamedTuple):
    """One kernel on one shape. `make` builds inputs and returns a function that runs the kernel."""

    name: str
    bytes_moved: int
    make: Callable[[], Callable[[], object]]


class Figure(NamedTuple):
    """Times of one call. floor_s: the time to move its bytes. median_s: the measured median."""

    name: str
    bytes_moved: int
    floor_s: float
    median_s: float


def copy_bandwidth() -> float:
    """Return the bytes per second of a device-to-device copy, reads plus writes."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / graph_seconds([lambda: torch.neg(source, out=target)])


def cases(tokens: Sequence[int], rows: Sequence[int]) -> Iterator[Case]:
    """Yield the layer kernels for each number in `tokens`.

    Then yield the samplers and the metadata kernels for each number in `rows`.
    """
    for model in _HIDDEN_SIZES:
        for count in (1, 16, 32, 64, 96, 128, 192, 256):
            yield from (_layer(model, count, ours) for ours in (False, True))
        for count in (1, 8, 9, 16, 32, 64, 128, 129, 256, 512, 8192):
            yield from (_fp8_layer(model, count, blocks) for blocks in (False, True))
    for count in tokens:
        for hidden, q_heads, kv_heads, inner in ((1024, 16, 8, 3072), (4096, 32, 8, 12288)):
            yield _add_rms_norm(count, hidden)
            yield _silu_and_mul(count, inner)
            yield _qk_norm_rope_store(count, q_heads, kv_heads)
    yield from (Case(*case) for case in layer_cases(sorted({*tokens, 16})))
    yield from (Case(*case) for case in gpt_oss_cases(sorted({*tokens, 16})))
    states = delta_cases(), scan_cases()
    others = attention_cases(), draft_cases(), *states, packed_cases(), paged_cases()
    yield from (Case(*case) for case in itertools.chain(*others))
    for count in rows:
        for dtype in (torch.float32, torch.bfloat16):
            yield _sample("greedy", count, dtype, temperature=0.0)
            yield _sample("plain", count, dtype)
        yield _sample("top-p 0.95, peaked", count, torch.float32, spread=4.0, top_p=0.95)
        yield _sample("top-k 50 top-p 0.9", count, torch.float32, top_k=50, top_p=0.9)
        yield _sample("top-p 0.95, flat", count, torch.float32, spread=0.3, top_p=0.95)
        yield _step(count)


def _normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def _layer(model: str, rows: int, ours: bool) -> Case:
    """A dense layer of one rank without attention, as the decoder runs it.

    ours: with the engine's kernels where they are faster.
    """
    hidden, queries, heads, inner = _HIDDEN_SIZES[model]
    shapes = ((heads, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner))

    def make() -> Callable[[], object]:
        qkv, o, gate_up, down = (_normal(*shape) / shape[1] ** 0.5 for shape in shapes)
        semaphores = _integers(1, inner) if ours else None
        stream, squares = _normal(rows, hidden), None

        def call() -> None:
            nonlocal squares
            norm = PendingNorm(1e-6, squares)
            x = dispatch.linear(stream, qkv, None, semaphores, norm)[:, :queries]
            norm = PendingNorm(1e-6, dispatch.add_linear(stream, x, o, None, semaphores)[1])
            x = dispatch.linear(stream, gate_up, None, semaphores, norm, gated=True)
            squares = dispatch.add_linear(stream, x, down, None, semaphores)[1]

        return call

    name = f"layer {model} {rows} rows, {'ours where faster' if ours else 'cuBLAS, norms, silu'}"
    return Case(name, sum(2 * height * width for height, width in shapes), make)


def _fp8_layer(model: str, rows: int, blocks: bool) -> Case:
    """As _layer, with FP8 weights and one scale for each row or for each block of 128 x 128.

    The engine chooses between its own kernel and torch's (fp8_tilings.py).
    """
    hidden, queries, heads, inner = _HIDDEN_SIZES[model]
    shapes = ((heads, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner))

    def make() -> Callable[[], object]:
        qkv, o, gate_up, down = (_fp8_weights(*shape, blocks) for shape in shapes)
        semaphores, norm_weight = _integers(1, inner), _normal(hidden)
        stream, norm = _normal(rows, hidden), PendingNorm(1e-6)

        def norm_of_sum(x: Tensor, linear: tuple[Tensor, Scales]) -> PendingNorm:
            out, residual, squares = fp8_add_linear(stream, x, *linear, None, semaphores)
            return PendingNorm(1e-6, squares, None if residual is None else out)

        def call() -> None:
            nonlocal norm
            x = fp8_linear(stream, *qkv, None, semaphores, norm, norm_weight)[:, :queries]
            norm = norm_of_sum(x, o)
            given = (*gate_up, None, semaphores, norm, norm_weight)
            norm = norm_of_sum(fp8_linear(stream, *given, gated=True, leave_gate=True), down)

        return call

    name = f"fp8 layer {model} {rows} rows, scales of {'blocks' if blocks else 'rows'}"
    return Case(name, sum(height * width for height, width in shapes), make)


def _fp8_weights(height: int, width: int, blocks: bool) -> tuple[Tensor, Scales]:
    rows, columns = (128, 128) if blocks else (1, width)
    values = torch.full((height // rows, width // columns), width**-0.5, device="cuda")
    return _normal(height, width).to(FP8), Scales(values, rows, columns)


def _integers(high: int, count: int) -> Tensor:
    return torch.randint(0, high, (count,), device="cuda", dtype=torch.int32)


def _add_rms_norm(tokens: int, hidden: int) -> Case:
    def make() -> Callable[[], object]:
        x, residual = _normal(tokens, hidden), _normal(tokens, hidden)
        weight = _normal(hidden) * 0.1
        return lambda: dispatch.add_rms_norm(x, residual, weight, 1e-6)

    return Case(f"add_rms_norm {tokens} x {hidden}", 8 * tokens * hidden, make)


def _silu_and_mul(tokens: int, inner: int) -> Case:
    def make() -> Callable[[], object]:
        x = _normal(tokens, 2 * inner)
        return lambda: dispatch.silu_and_mul(x)

    return Case(f"silu_and_mul {tokens} x {inner}", 6 * tokens * inner, make)


def _qk_norm_rope_store(tokens: int, q_heads: int, kv_heads: int) -> Case:
    dim, page_size, pages = 128, 16, 2048
    width = (q_heads + 2 * kv_heads) * dim

    def make() -> Callable[[], object]:
        qkv, q_weight, k_weight = _normal(tokens, width), _normal(dim), _normal(dim)
        cos_sin = _normal(4096, dim, dtype=torch.float32)
        positions = _integers(4096, tokens)
        slots = torch.randperm(pages * page_size, device="cuda")[:tokens].int()
        k_pool, v_pool = _normal(2, pages, page_size, kv_heads, dim)
        tensors = qkv, q_weight, k_weight, 1e-6, cos_sin, positions, slots, k_pool, v_pool
        return lambda: dispatch.qk_norm_rope_store(*tensors, q_heads, kv_heads, dim)

    name = f"qk_norm_rope_store {tokens} x ({q_heads} + 2 * {kv_heads})"
    return Case(name, 4 * tokens * width + 4 * tokens * dim, make)


def _sample(
    name: str,
    rows: int,
    dtype: torch.dtype,
    *,
    temperature: float = 0.6,
    top_k: int = 0,
    top_p: float = 1.0,
    spread: float = 3.0,
) -> Case:
    def make() -> Callable[[], object]:
        logits = (_normal(rows, _VOCAB, dtype=torch.float32) * spread).to(dtype)

        def filled(value: float) -> Tensor:
            return torch.full((rows,), value, device="cuda")

        params = SamplingTensors(
            temperature=filled(temperature),
            top_k=_integers(1, rows) + top_k,
            top_p=filled(top_p),
            min_p=filled(0.0),
            seed=_integers(2**31 - 1, rows).long(),
            position=_integers(1000, rows),
            any_random=temperature > 0,
            filters=top_k > 0 or top_p < 1,
        )
        return lambda: dispatch.sample(logits, params)

    passes = 3 if top_k or top_p < 1 else 1
    moved = passes * rows * _VOCAB * dtype.itemsize
    return Case(f"sample {name}, {str(dtype)[6:]} {rows} rows", moved, make)


def _step(reqs: int) -> Case:
    """All metadata kernels of one decode step."""

    def make() -> Callable[[], object]:
        layout = StepLayout(reqs)
        views = layout.views(torch.zeros(layout.words, dtype=torch.int32, device="cuda"))
        views.rows.copy_(torch.randperm(reqs))
        views.start.copy_(_integers(2000, reqs))
        views.lengths.fill_(1)
        views.first.copy_(torch.arange(reqs))
        table = _integers(10_000, reqs * 256).view(reqs, 256)
        pool = _integers(1000, reqs * 2048).view(reqs, 2048)
        ids, positions, slots, last, indptr = _integers(1, 5 * reqs + 5).view(5, reqs + 1)
        indices = _integers(1, reqs * 256)

        def call() -> None:
            requests = views.rows, views.start, views.first
            outputs = ids[:reqs], positions[:reqs], slots[:reqs]
            dispatch.stage_tokens(*requests, ids[:0], reqs, table, pool, 16, *outputs)
            contexts = views.rows, views.start, views.lengths
            dispatch.kv_metadata(*contexts, table, 16, indptr, indices, last[:reqs])
            dispatch.put_tokens(pool, *contexts, views.samples, ids)

        return call

    return Case(f"step metadata, 3 launches, {reqs} reqs", 0, make)


def measure(case: Case, bandwidth: float) -> Figure:
    """Time one case and free its inputs."""
    sets = min(max(_ROTATED_BYTES // max(case.bytes_moved, 1), 2), 24)
    median = graph_seconds([case.make() for _ in range(sets)])
    return Figure(case.name, case.bytes_moved, case.bytes_moved / bandwidth, median)


def main(argv: Sequence[str]) -> int:
    """Print a table and one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench kernels", description=__doc__)
    parser.add_argument(
        "--tokens",
        type=positive_int,
        nargs="+",
        default=[1, 64, 256, 8192],
        help="tokens of a step, for norms, activations and experts (1 64 256 8192)",
    )
    parser.add_argument(
        "--rows",
        type=positive_int,
        nargs="+",
        default=[1, 64, 256],
        help="requests of a step, for samplers and metadata (1 64 256)",
    )
    parser.add_argument(
        "--only", default="", help="time only kernels whose name starts with this text"
    )
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    bandwidth = copy_bandwidth()
    every = cases(options.tokens, options.rows)
    chosen = [case for case in every if case.name.startswith(options.only)]
    figures = [measure(case, bandwidth) for case in Progress(chosen, desc="kernels")]
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s")
    times = {"floor, µs": ">9.1f", "measured, µs": ">12.1f", "of floor": ">8.0%"}
    table = TextTable({"kernel": "<48", "MB": ">8.2f"} | times)
    print(table.head)
    for name, moved, floor_s, median_s in figures:
        print(table.row(name, moved / 1e6, 1e6 * floor_s, 1e6 * median_s, floor_s / median_s))
    print(json.dumps([figure._asdict() for figure in figures]))
    return 0
