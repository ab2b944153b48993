"""Draws the pictures of docs/benchmarks.md from bench/results, as SVG files in docs/pictures.

A picture of bars has a group for each figure, and a bar for each series with a value. A curve has a
line for each series, over a column of the figures. A value of a newer record replaces an older one
of the same name. A picture without a value is not drawn.
"""

import argparse
import math
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
_LETTER = 7  # width of a letter in names and legends, more than the mean
_MARGIN, _PANEL, _BOTTOM = 50, 280, 300  # of a curve


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


class Panel(NamedTuple):
    """A half of a curve's picture: a line for each series. Its axis of values is logarithmic."""

    title: str
    series: tuple[Series, ...]


class Curve(NamedTuple):
    """A file of PICTURES. results: the benchmark. over: the column of the horizontal axis."""

    results: str
    title: str
    over: str
    axis: str
    panels: tuple[Panel, Panel]


class Group(NamedTuple):
    """The bars of one figure: pairs of a number of the series and a value."""

    name: str
    bars: list[tuple[int, float]]


Line = list[tuple[float, float]]  # points of one series, from left to right

ALL: tuple[Picture | Curve, ...] = (
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
            Series("int4 weights", "int4_weights_ms"),
        ),
    ),
    Curve(
        "latency",
        "Qwen3-8B on one H200, prompts and outputs of 100 to 1,024 tokens over HTTP",
        "offered_per_s",
        "requests a second",
        (
            Panel(
                "first token, ms",
                (Series("median", "first_token_p50_ms"), Series("p99", "first_token_p99_ms")),
            ),
            Panel(
                "gap between two tokens of a stream, ms",
                (Series("median", "gap_p50_ms"), Series("p99", "gap_p99_ms")),
            ),
        ),
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
        "agents",
        "Prefix cache on one H200: prompt tokens that are hits, %",
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


def lines_of(curve: Curve, panel: Panel, records: Iterable[Record]) -> list[Line]:
    """Return the line of each series of a panel."""
    found: list[dict[float, float]] = [{} for _ in panel.series]
    for record in records:
        for figure in record.figures:
            at = figure.values.get(curve.over)
            for points, series in zip(found, panel.series, strict=True):
                value = figure.values.get(series.column)
                if record.engine == series.engine and at is not None and value:
                    points[at] = value
    return [sorted(points.items()) for points in found]


def drawing(picture: Picture | Curve, records: Sequence[Record]) -> str | None:
    """Return the picture as SVG; None without a value."""
    if isinstance(picture, Curve):
        lines = [lines_of(picture, panel, records) for panel in picture.panels]
        return draw_curve(picture, lines) if all(map(any, lines)) else None
    groups = groups_of(picture, records)
    return draw(picture, groups) if groups else None


def draw(picture: Picture, groups: Sequence[Group]) -> str:
    """Return the bars as SVG. The axis is linear and starts at 0, right of the longest name."""
    left = max(_LEFT, 16 + _LETTER * max(len(group.name) for group in groups))
    largest = max(value for group in groups for _, value in group.bars)
    parts = _legend(picture.series)
    y = _TOP
    for name, bars in groups:
        middle = y + len(bars) * _BAR / 2 + 4
        parts.append(_text(left - 8, middle, name, "text-anchor='end'"))
        for number, value in bars:
            length = value / largest * (_WIDTH - left - _RIGHT)
            parts.append(_bar(left, y, length, number))
            parts.append(_text(left + length + 5, y + _BAR - 4, f"{value:,.{_decimals(value)}f}"))
            y += _BAR
        y += _GAP
    return _svg(picture.title, y, parts)


def draw_curve(curve: Curve, lines: Sequence[Sequence[Line]]) -> str:
    """Return the panels side by side as SVG. lines: of each panel and series."""
    parts = _legend(curve.panels[0].series)
    for number, (panel, of_panel) in enumerate(zip(curve.panels, lines, strict=True)):
        parts += _panel(_MARGIN + number * (_PANEL + 2 * _MARGIN), panel.title, of_panel)
    parts.append(_text(_WIDTH / 2, _BOTTOM + 34, curve.axis, "text-anchor='middle'"))
    return _svg(curve.title, _BOTTOM + 44, parts)


def _panel(left: float, title: str, lines: Sequence[Line]) -> list[str]:
    points = [point for line in lines for point in line]
    most = max(at for at, _ in points)
    values = [value for _, value in points]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9)

    def place(at: float, value: float) -> tuple[float, float]:
        share = (math.log10(value) - low) / (high - low)
        return left + at / most * _PANEL, _BOTTOM - share * (_BOTTOM - _TOP - 20)

    parts = [_text(left, _TOP + 6, title)]
    for decade in range(low, high + 1):
        _, y = place(0, 10.0**decade)
        parts.append(f"<path d='M{left} {y:.1f}h{_PANEL}' stroke='#ddd'/>")
        parts.append(_text(left - 6, y + 4, f"{10.0**decade:,g}", "text-anchor='end'"))
    for at in sorted({at for at, _ in points}):
        x, _ = place(at, 10.0**low)
        parts.append(_text(x, _BOTTOM + 16, f"{at:g}", "text-anchor='middle'"))
    for number, line in enumerate(lines):
        corners = [place(*point) for point in line]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        colour = _COLOURS[number]
        parts.append(f"<polyline points='{joined}' fill='none' stroke='{colour}'/>")
        parts += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{colour}'/>" for x, y in corners]
    return parts


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    heading = _text(12, 24, title, "font-size='15' font-weight='bold'")
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{_WIDTH}' height='{height}' "
        f"viewBox='0 0 {_WIDTH} {height}' font-family='sans-serif' font-size='12'>\n"
        f"<rect width='100%' height='100%' fill='white'/>\n"
        + "\n".join([heading, *parts])
        + "\n</svg>\n"
    )


def _legend(named: Iterable[Series]) -> list[str]:
    parts, x = [], 12
    for number, series in enumerate(named):
        parts.append(_bar(x, 37, 12, number))
        parts.append(_text(x + 17, 48, series.label))
        x += 17 + _LETTER * len(series.label) + 20
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
        drawn = drawing(picture, read_records(picture.results, options.results))
        path = options.pictures / f"{picture.results}.svg"
        if drawn is not None:
            path.write_text(drawn, encoding="utf-8")
        else:
            sys.stderr.write(f"{path.name}: not drawn, because the results have no value\n")
            missing += 1
    return 1 if missing else 0
