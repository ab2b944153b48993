"""Draws the pictures of docs/benchmarks.md from bench/results, as SVG files in docs/pictures.

A picture has a group of bars for each figure, and a bar for each series with a value. A value of a
newer record replaces an older one of the same name. A picture without a value is not drawn.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from bench.records import RESULTS, Record, read_records
from minisgl.core import ConfigError

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
_COLOURS = ("#4878a8", "#e0913c", "#8c8c8c", "#6aa66a")
_WIDTH, _LEFT, _RIGHT = 760, 300, 80
_TOP, _BAR, _GAP = 66, 15, 13


class Series(NamedTuple):
    """The values of one column, of one engine. label: in the legend."""

    label: str
    column: str
    engine: str = "minisgl"


class Picture(NamedTuple):
    """A file of PICTURES. results: the benchmark. names: its figures in order; (): all."""

    results: str
    title: str
    series: tuple[Series, ...]
    names: tuple[str, ...] = ()


class Group(NamedTuple):
    """The bars of one figure: pairs of a number of the series and a value."""

    name: str
    bars: list[tuple[int, float]]


ALL = (
    Picture(
        "peers",
        "README workload on one H200, bf16: output tokens per second",
        (
            Series("minisgl", "tokens_per_s"),
            Series("mini-sglang 20fcd7f", "tokens_per_s", "mini-sglang"),
            Series("vLLM 0.23.0", "tokens_per_s", "vLLM"),
        ),
        ("Qwen3-0.6B", "Qwen3-8B", "Qwen3-14B"),
    ),
    Picture(
        "batch1",
        "One request on one H200, 1,024 tokens of context unless named: ms of a decode step",
        (
            Series("bf16", "bf16_ms"),
            Series("FP8 weights", "fp8_weights_ms"),
            Series("FP8 weights and KV", "fp8_weights_and_kv_ms"),
        ),
    ),
    Picture(
        "latency",
        "Qwen3-8B over HTTP on one H200: ms between two tokens of a stream",
        (Series("median", "gap_p50_ms"), Series("99th percentile", "gap_p99_ms")),
    ),
    Picture(
        "start",
        "Start to ready on one H200: seconds",
        (
            Series("warm caches", "warm_s"),
            Series("no compiled Triton kernels", "empty_triton_cache_s"),
            Series("nothing compiled", "empty_caches_s"),
        ),
    ),
    Picture(
        "cache",
        "Prefix cache on the conversation trace: prompt tokens that are hits, %",
        (
            Series("measured", "hits_percent"),
            Series("ideal LRU cache of the same size", "ideal_lru_percent"),
            Series("clairvoyant cache", "clairvoyant_percent"),
        ),
    ),
    Picture(
        "quality",
        "Rounding: KL divergence from transformers in float32, 0.001 nats",
        (
            Series("minisgl", "kl_nats"),
            Series("transformers with the same rounding", "kl_transformers_nats"),
        ),
    ),
)


def groups_of(picture: Picture, records: Iterable[Record]) -> list[Group]:
    """Return the groups that have a value, in the order of their first figure."""
    values: dict[str, dict[int, float]] = {name: {} for name in picture.names}
    for record in records:
        for figure in record.figures:
            for number, series in enumerate(picture.series):
                value = figure.values.get(series.column)
                if record.engine != series.engine or value is None:
                    continue
                if not picture.names or figure.name in picture.names:
                    scale = 1e3 if series.column.endswith("_nats") else 1.0
                    values.setdefault(figure.name, {})[number] = value * scale
    return [Group(name, sorted(bars.items())) for name, bars in values.items() if bars]


def draw(picture: Picture, groups: Sequence[Group]) -> str:
    """Return the picture as SVG. The axis is linear and starts at 0."""
    largest = max(value for group in groups for _, value in group.bars)
    parts = [_text(12, 24, picture.title, "font-size='15' font-weight='bold'"), *_legend(picture)]
    y = _TOP
    for name, bars in groups:
        middle = y + len(bars) * _BAR / 2 + 4
        parts.append(_text(_LEFT - 8, middle, name, "text-anchor='end'"))
        for number, value in bars:
            length = value / largest * (_WIDTH - _LEFT - _RIGHT)
            parts.append(_bar(_LEFT, y, length, number))
            parts.append(_text(_LEFT + length + 5, y + _BAR - 4, f"{value:,.{_decimals(value)}f}"))
            y += _BAR
        y += _GAP
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{_WIDTH}' height='{y}' "
        f"viewBox='0 0 {_WIDTH} {y}' font-family='sans-serif' font-size='12'>\n"
        f"<rect width='100%' height='100%' fill='white'/>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _legend(picture: Picture) -> list[str]:
    parts, x = [], 12
    for number, series in enumerate(picture.series):
        parts.append(_bar(x, 37, 12, number))
        parts.append(_text(x + 17, 48, series.label))
        x += 17 + 7 * len(series.label) + 20
    return parts


def _bar(x: float, y: float, length: float, number: int) -> str:
    box = f"x='{x}' y='{y}' width='{length:.1f}' height='{_BAR - 2}'"
    return f"<rect {box} fill='{_COLOURS[number]}'/>"


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {style}>{escape(text)}</text>"


def _decimals(value: float) -> int:
    return 0 if value >= 1000 else 1 if value >= 20 else 2


def main(argv: Sequence[str]) -> int:
    """Write the pictures. Returns 1 if a picture has no value, after all others are written."""
    parser = argparse.ArgumentParser(prog="python -m bench plot", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder (bench/results)")
    parser.add_argument("--pictures", type=Path, default=PICTURES, help="folder (docs/pictures)")
    options = parser.parse_args(argv)
    if not options.results.is_dir():
        raise ConfigError(f"{options.results} is not a folder with results of benchmarks")
    options.pictures.mkdir(parents=True, exist_ok=True)
    missing = 0
    for picture in ALL:
        groups = groups_of(picture, read_records(picture.results, options.results))
        path = options.pictures / f"{picture.results}.svg"
        if groups:
            path.write_text(draw(picture, groups), encoding="utf-8")
        else:
            sys.stderr.write(f"{path.name}: not drawn, because the results have no value\n")
            missing += 1
    return 1 if missing else 0
