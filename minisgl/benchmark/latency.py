"""Latencies measured by the clients, TTFT, ITL, TPOT and E2E, and their percentiles.

TTFT  time to first token: from sending a request to its first event with output.
ITL   inter-token latency: the time between two successive events with output of one request.
E2E   end to end: from sending a request to its last event with output.
TPOT  time per output token: (E2E - TTFT) / (output tokens - 1), for requests with at least two
      output tokens.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from minisgl.benchmark.client import Answer
from minisgl.benchmark.text_table import TextTable

PERCENTILES = (50, 90, 99)
_TURNS = ((1, 1, "turn 1"), (2, 2, "turn 2"), (3, 10, "turns 3-10"), (11, sys.maxsize, "turns 11-"))
Samples = NDArray[np.float64]


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """Samples in seconds, in the order of the answers. Failed requests have none."""

    ttft_s: Samples
    itl_s: Samples
    tpot_s: Samples
    e2e_s: Samples


def latencies(answers: Iterable[Answer]) -> Latencies:
    """Return the samples of all answers that have output and no error."""
    good = [answer for answer in answers if answer.error is None and answer.outputs_s]
    ttft_s = _array(a.outputs_s[0] - a.sent_s for a in good)
    e2e_s = _array(a.outputs_s[-1] - a.sent_s for a in good)
    tokens = np.array([a.output_tokens for a in good], dtype=np.int64)
    several = tokens > 1
    gaps = [np.diff(np.array(answer.outputs_s)) for answer in good]
    return Latencies(
        ttft_s=ttft_s,
        itl_s=np.concatenate([np.empty(0), *gaps]),
        tpot_s=(e2e_s[several] - ttft_s[several]) / (tokens[several] - 1),
        e2e_s=e2e_s,
    )


def describe(samples: Samples) -> dict[str, float]:
    """Return mean, percentiles and maximum, or {} without samples.

    A percentile between two samples is interpolated linearly.
    """
    if not len(samples):
        return {}
    summary = {"mean": float(samples.mean())}
    for percent in PERCENTILES:
        summary[f"p{percent}"] = float(np.percentile(samples, percent))
    return summary | {"max": float(samples.max())}


def summarise(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return counts, rates and latencies of one run.

    The run lasts from the first request sent to the last event with output. prefix_hit_ratio is
    the share of prompt tokens that the server reports as cached.
    """
    good = [answer for answer in answers if answer.error is None]
    ended = [answer.outputs_s[-1] for answer in good if answer.outputs_s]
    seconds = max(ended, default=0.0) - min((a.sent_s for a in answers), default=0.0)
    prompt_tokens = sum(answer.prompt_tokens for answer in good)
    cached_tokens = sum(answer.cached_tokens for answer in good)
    output_tokens = sum(answer.output_tokens for answer in good)
    rate = 1 / seconds if ended and seconds > 0 else 0.0
    return {
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "seconds": seconds if ended else 0.0,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "prefix_hit_ratio": cached_tokens / prompt_tokens if prompt_tokens else 0.0,
        "output_tokens": output_tokens,
        "events": sum(len(answer.outputs_s) for answer in good),
        "requests_per_s": len(good) * rate,
        "output_tokens_per_s": output_tokens * rate,
        **{name: describe(s) for name, s in msgspec.structs.asdict(latencies(good)).items()},
    }


def by_turn(answers: Sequence[Answer], turns: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return the TTFT of first turns, second turns, turns 3 to 10, and later ones.

    turns: the number of each request in the conversation of its agent, from 1.
    """
    pairs = list(zip(answers, turns, strict=True))
    found = {}
    for low, high, name in _TURNS:
        chosen = latencies(answer for answer, turn in pairs if low <= turn <= high).ttft_s
        if len(chosen):
            found[name] = describe(chosen)
    return found


def table(summary: dict[str, Any]) -> str:
    """Format the latencies in milliseconds, one line each.

    The line BESIDE, if any, is the inter-token latency of the background streams. The lines TTFT
    and turns are there if the load has sessions.
    """
    columns = ("mean", *(f"p{percent}" for percent in PERCENTILES), "max")
    lines = TextTable({"ms": "<16"} | dict.fromkeys(columns, ">10,.2f"))
    rows = {name.removesuffix("_s").upper(): summary[name] for name in Latencies.__struct_fields__}
    rows |= {f"TTFT {name}": row for name, row in summary.get("ttft_s_by_turn", {}).items()}
    if beside := summary.get("beside"):
        rows["BESIDE"] = beside["itl_s"]
    cells = ((name, *(1e3 * row[c] if row else "-" for c in columns)) for name, row in rows.items())
    return "\n".join([lines.head, *(lines.row(*each) for each in cells)])


def error_lines(answers: Iterable[Answer]) -> list[str]:
    """Return a line for each of at most three different errors."""
    errors = {answer.error for answer in answers if answer.error is not None}
    return [f"error: {error}" for error in sorted(errors)[:3]]


def _array(values: Iterable[float]) -> Samples:
    return np.array(list(values), dtype=np.float64)
