"""What the API server counts by itself: names, help, labels and buckets."""

from collections.abc import Mapping
from itertools import product
from typing import TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from minisgl.server.config import Limits

WINDOW_REQS = 1000
# By their names in Limits; the context length is the engine's own.
LIMITS = (*Limits.__struct_fields__, "max_seq_len")

_FIRST_S: tuple[float, ...] = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75)
_FIRST_S += (1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN_S: tuple[float, ...] = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04)
_BETWEEN_S += (0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
_WHOLE_S: tuple[float, ...] = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60)
_WHOLE_S += (120, 240, 480, 960, 1920)
_TOKENS = tuple(first * 10**power for power in range(6) for first in (1, 2, 5))

# Each has the label model_name too: the first name that is served. By name: help, and the values of
# each further label that are known from the start, whose series exist at 0; () when none is.
Declared = Mapping[str, tuple[str, Mapping[str, tuple[str, ...]]]]
GAUGES: Declared = {
    "requests_running": ("Requests in the batch.", {}),
    "requests_waiting": ("Requests accepted and not yet admitted.", {}),
    "prefix_cache_hit_ratio": (f"Tokens found by the last {WINDOW_REQS} requests.", {}),
    "scheduler_last_step_timestamp_seconds": ("Unix time of the last step's end.", {}),
    "model_info": ("Always 1.", {"dtype": (), "device": (), "tp_size": ()}),
}
COUNTERS: Declared = {
    "prompt_tokens_total": ("Prompt tokens, each prompt once.", {}),
    "generation_tokens_total": ("Tokens generated.", {}),
    "requests_total": (
        "Requests that ended; what clients did wrong does not count.",
        {"outcome": ("stop", "length", "abort", "error", "rejected")},
    ),
    "requests_rejected_total": (
        "Requests refused with 503.",
        {"reason": ("queue_full", "loading", "draining", "failed")},
    ),
    "limits_exceeded_total": ("Requests and connections over a limit.", {"limit": LIMITS}),
}
# By name: help, and upper bounds.
HISTOGRAMS = {
    "time_to_first_token_seconds": ("Arrival to first output.", _FIRST_S),
    "inter_token_latency_seconds": ("Between outputs.", _BETWEEN_S),
    "time_per_output_token_seconds": ("Mean of a request after the first.", _BETWEEN_S),
    "request_duration_seconds": ("Arrival to last output.", _WHOLE_S),
    "request_queue_seconds": ("Arrival to first admission.", _WHOLE_S),
    "request_prefill_seconds": ("First admission to first output.", _WHOLE_S),
    "request_decode_seconds": ("First to last output.", _WHOLE_S),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "request_generation_tokens": ("Tokens generated for a request.", _TOKENS),
}
# Of the start.
PHASES = ("load", "kv_alloc", "cuda_graph", "warm_up", "total")
_Kind = TypeVar("_Kind", bound=MetricWrapperBase)


def families(
    kind: type[_Kind], declared: Declared, registry: CollectorRegistry, model_name: str
) -> dict[str, _Kind]:
    """By name without minisgl_."""
    made = {}
    for name, (text, labels) in declared.items():
        family = kind(f"minisgl_{name}", text, ("model_name", *labels), registry=registry)
        for values in product(*labels.values()):
            family.labels(model_name, *values)
        made[name] = family
    return made
