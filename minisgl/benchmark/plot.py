"""Plots latencies as a small SVG: for each metric, the cumulative distribution of its samples."""

import msgspec
import numpy as np

from minisgl.benchmark.latency import PERCENTILES, Latencies, Samples

_WIDTH, _HEIGHT, _MARGIN = 320, 220, 40
_SHARES = np.linspace(0.0, 100.0, 201)


def plot_latencies(latencies: Latencies) -> str:
    """Return an SVG with a panel for each metric. The axes are linear and start at 0."""
    metrics = msgspec.structs.asdict(latencies)
    panels = [
        f'<g transform="translate({index * _WIDTH},0)">{_panel(name, samples)}</g>'
        for index, (name, samples) in enumerate(metrics.items())
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH * len(metrics)}" '
        f'height="{_HEIGHT}" font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(panels)}</svg>'
    )


def _panel(name: str, samples: Samples) -> str:
    left, right, top, bottom = _MARGIN, _WIDTH - _MARGIN / 2, _MARGIN, _HEIGHT - _MARGIN
    parts = [
        f'<text x="{left}" y="{top - 20}">{name.removesuffix("_s").upper()}</text>',
        f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="gray"/>',
    ]
    if len(samples):
        values = np.percentile(samples, _SHARES) * 1e3
        largest = max(float(values[-1]), 1e-9)
        x = left + values / largest * (right - left)
        y = bottom - _SHARES / 100 * (bottom - top)
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
        parts.append(f'<polyline points="{line}" fill="none" stroke="steelblue"/>')
        marks = ", ".join(f"p{p} {np.percentile(samples, p) * 1e3:.4g}" for p in PERCENTILES)
        parts.append(f'<text x="{left}" y="{top - 6}">{marks} ms</text>')
        parts.append(
            f'<text x="{right}" y="{bottom + 14}" text-anchor="end">{largest:.4g} ms</text>'
        )
    return "".join(parts)
