"""The results of fleet runs: goodput under an objective, a table, plots, and the least replicas."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from minisgl.benchmark.client import Answer
from minisgl.benchmark.fleet.fleet import FleetResult, ReplicaCount
from minisgl.benchmark.latency import Latencies, latencies, summarise
from minisgl.benchmark.plot import plot_latencies

_PANEL_WIDTH, _ROW_HEIGHT = 320, 240


class Objective(NamedTuple):
    """A share of the requests must be good.

    A request is good if it ends without an error, its time to first token is at most ttft_s, and
    the mean of its inter-token latencies is at most itl_s.
    """

    ttft_s: float
    itl_s: float
    share: float

    def is_good(self, answer: Answer) -> bool:
        if answer.error is not None or not answer.outputs_s:
            return False
        first_s, last_s = answer.outputs_s[0], answer.outputs_s[-1]
        gaps = len(answer.outputs_s) - 1
        return first_s - answer.sent_s <= self.ttft_s and last_s - first_s <= self.itl_s * gaps


class Run(NamedTuple):
    """One simulated run. summary: counts, rates and latencies, ready for JSON."""

    router: str
    replicas: int
    latencies: Latencies
    counts: list[ReplicaCount]
    summary: dict[str, Any]


def make_run(router: str, replicas: int, result: FleetResult, objective: Objective) -> Run:
    """Summarise a run.

    good_share is the share of the good requests; goodput_per_s counts the good requests of a
    second. replica_hours counts starting and draining replicas too, because they hold GPUs.
    """
    answers = result.answers
    good = sum(map(objective.is_good, answers))
    summary = summarise(answers)
    ends_s = [*(count.at_s for count in result.counts[1:]), result.seconds]
    held_s = sum(
        count.total * (end_s - count.at_s)
        for count, end_s in zip(result.counts, ends_s, strict=True)
    )
    summary |= {
        "router": router,
        "replicas": replicas,
        "good_share": good / len(answers),
        "goodput_per_s": good / summary["seconds"] if summary["seconds"] else 0.0,
        "meets_objective": good >= objective.share * len(answers),
        "resent": result.resent,
        "replica_hours": held_s / 3600,
        "replicas_over_time": [count._asdict() for count in result.counts],
    }
    return Run(router, replicas, latencies(answers), result.counts, summary)


def least_replicas(meets: Callable[[int], bool], most: int) -> int | None:
    """Return the smallest number from 1 to `most` that meets the objective; None: no number does.

    If a number meets the objective, every larger number must meet it too. The search doubles
    the number until it meets the objective, and then halves the interval.
    """
    failed, tried = 0, 1
    while not meets(tried):
        if tried == most:
            return None
        failed, tried = tried, min(2 * tried, most)
    while tried - failed > 1:
        middle = (failed + tried) // 2
        if meets(middle):
            tried = middle
        else:
            failed = middle
    return tried


HEADER = (
    f"{'router':<12}{'replicas':>9}{'good':>9}{'good/s':>8}{'TTFT p50':>10}{'p99':>9}{'ITL p50':>9}"
    f"{'p99':>8}{'hits':>8}{'failed':>8}{'resent':>8}{'hours':>8}"
)


def row(run: Run) -> str:
    """Return the line of a run under HEADER. Latencies are in milliseconds."""
    found = run.summary
    ttft, itl = found["ttft_s"], found["itl_s"]
    times = [
        *(ttft.get(p, float("nan")) * 1e3 for p in ("p50", "p99")),
        *(itl.get(p, float("nan")) * 1e3 for p in ("p50", "p99")),
    ]
    return (
        f"{run.router:<12}{run.replicas:>9}{found['good_share']:>9.2%}{found['goodput_per_s']:>8.2f}"
        f"{times[0]:>10,.0f}{times[1]:>9,.0f}{times[2]:>9.1f}{times[3]:>8.1f}"
        f"{found['prefix_hit_ratio']:>8.2%}{found['failed']:>8}{found['resent']:>8}"
        f"{found['replica_hours']:>8.2f}"
    )


def replica_lines(run: Run) -> list[str]:
    """Return a line with the replicas over time; [] if their number never changed."""
    changes = ", ".join(f"{at_s:.0f} s {ready}/{total}" for at_s, ready, total in run.counts)
    return [f"  ready/all replicas: {changes}"] if len(run.counts) > 1 else []


def plot(runs: Sequence[Run]) -> str:
    """Return an SVG with a row for each run: its latencies, and its replicas over time.

    In the last panel, a blue line shows the ready replicas and a gray line shows all replicas.
    """
    rows = []
    width = (len(Latencies.__struct_fields__) + 1) * _PANEL_WIDTH
    for index, run in enumerate(runs):
        panels = plot_latencies(run.latencies).replace("<svg ", '<svg y="20" ', 1)
        title = escape(f"{run.router}, {run.replicas} replicas")
        rows.append(
            f'<g transform="translate(0,{index * _ROW_HEIGHT})"><text x="40" y="16">{title}</text>'
            f'{panels}<g transform="translate({width - _PANEL_WIDTH},20)">{_replicas(run)}</g></g>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
        f'height="{len(runs) * _ROW_HEIGHT}" font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(rows)}</svg>'
    )


def _replicas(run: Run) -> str:
    left, right, top, bottom = 40.0, 300.0, 40.0, 180.0
    end_s = max(run.summary["seconds"], run.counts[-1].at_s, 1e-9)
    most = max(count.total for count in run.counts)
    parts = [
        f'<text x="{left}" y="{top - 20}">REPLICAS</text>',
        f'<text x="{left}" y="{top - 6}">at most {most}, over {end_s:,.0f} s</text>',
        f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="gray"/>',
    ]
    times_s = [*(count.at_s for count in run.counts), end_s]
    x = [left + at_s / end_s * (right - left) for at_s in times_s]
    for name, colour in (("total", "silver"), ("ready", "steelblue")):
        y = [bottom - getattr(count, name) / most * (bottom - top) for count in run.counts]
        steps = "".join(f"V{at_y:.1f}H{to_x:.1f}" for at_y, to_x in zip(y, x[1:], strict=True))
        parts.append(f'<path d="M{left} {bottom}{steps}" fill="none" stroke="{colour}"/>')
    return "".join(parts)
