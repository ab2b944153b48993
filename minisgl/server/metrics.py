"""Every metric of minisgl: its declaration, its counting, and the scrape.

The API server counts requests itself, so that each number is exact once the client has read the
response. The numbers of the engine come from the latest SchedulerStats at each scrape. The table
for readers is in docs/operations.md.
"""

import time
from collections import Counter as Counted
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, product
from math import inf
from types import MappingProxyType
from typing import TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

import minisgl
from minisgl.core import FinishReason, Overloaded, RequestError
from minisgl.message import messages
from minisgl.server.config import DEFAULT_CLIENT, LIMIT_NAMES
from minisgl.server.errors import NotReady, error_reply
from minisgl.server.generation import Choice
from minisgl.server.lifecycle import Phase

# Encoding a scrape takes 1.8 ms of the event loop, in OpenMetrics 2.9 ms. A scrape is reused for
# CACHED_S, so that encoding takes at most 3 % of the loop with any number of clients.
CACHED_S = 0.1
_HIT_RATIO_REQS = 1000

_OPENMETRICS = "application/openmetrics-text"
_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS"})
_REJECT_REASONS = {Phase.LOADING: "loading", Phase.FAILED: "failed"}
_COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)

_FIRST_S: tuple[float, ...] = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75)
_FIRST_S += (1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN_S: tuple[float, ...] = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04)
_BETWEEN_S += (0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
_WHOLE_S: tuple[float, ...] = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60)
_WHOLE_S += (120, 240, 480, 960, 1920)
_TOKENS = tuple(first * 10**power for power in range(6) for first in (1, 2, 5))

# Help texts by name, without "minisgl_" in front. All of them have the label model_name, the first
# served name, except those in _OF_PROCESS.
_GAUGES: Mapping[str, str] = {
    "requests_running": "Requests in the batch.",
    "requests_waiting": "Requests accepted and not yet admitted to the batch.",
    "key_requests_open": "Requests accepted and not ended, by name of the key.",
    "prefix_cache_hit_ratio": "Share of prompt tokens found in the cache, last 1000 requests.",
    "scheduler_last_step_timestamp_seconds": "Unix time of the end of the last step.",
    "model_info": "Always 1.",
    "http_requests_in_flight": "HTTP requests without a complete response, probes excluded.",
    "startup_seconds": "Duration of each phase of the start.",
    "ready": "1 while /readyz answers 200.",
    "draining": "1 after SIGTERM.",
    "build_info": "Always 1.",
}
_COUNTERS: Mapping[str, str] = {
    "prompt_tokens_total": "Prompt tokens of admitted requests, each prompt once.",
    "generation_tokens_total": "Generated tokens.",
    "requests_total": "Requests that ended; invalid requests do not count.",
    "requests_rejected_total": "Requests rejected with status 503.",
    "key_requests_total": "Requests that reached the engine and ended, by name of the key.",
    "key_rejected_total": "Requests rejected with status 503, by name of the key.",
    "key_prompt_tokens_total": "Prompt tokens of admitted requests, by name of the key.",
    "key_generation_tokens_total": "Generated tokens, by name of the key.",
    "key_wait_seconds_total": "Time from arrival to the first output, summed by name of the key.",
    "limits_exceeded_total": "Requests and connections that exceeded a limit.",
    "http_requests_total": "HTTP responses.",
}
# With the upper bounds of the buckets.
HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Time from arrival to the first output.", _FIRST_S),
    "inter_token_latency_seconds": ("Time between two outputs of a request.", _BETWEEN_S),
    "time_per_output_token_seconds": ("Mean time per token after the first.", _BETWEEN_S),
    "request_duration_seconds": ("Time from arrival to the last output.", _WHOLE_S),
    "request_queue_seconds": ("Time from arrival to the first admission.", _WHOLE_S),
    "request_prefill_seconds": ("Time from first admission to first output.", _WHOLE_S),
    "request_decode_seconds": ("Time from the first to the last output.", _WHOLE_S),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "request_generation_tokens": ("Generated tokens of a request.", _TOKENS),
}
# Made from SchedulerStats at each scrape.
_OF_ENGINE: Mapping[str, str] = {
    "kv_cache_usage_ratio": "Share of KV tokens held by requests, 0 to 1.",
    "kv_cache_page_size_tokens": "Tokens in a KV page.",
    "kv_cache_pages": "KV pages.",
    "kv_cache_tokens": "KV tokens by state.",
    "prefix_cache_query_tokens_total": "Prompt tokens looked up in the cache, once per request.",
    "prefix_cache_hit_tokens_total": "Prompt tokens found in the cache.",
    "prefix_cache_evicted_tokens_total": "Tokens evicted from the cache.",
    "preemptions_total": "Running requests put back into the queue.",
    "nonfinite_rows_total": "Rows of logits with NaN or infinity.",
    "forward_passes_total": "Forward passes, with and without a CUDA graph.",
    "forward_seconds_total": "Time in forward passes.",
    "batch_size": "Requests in a forward pass.",
    "batch_tokens": "Tokens computed by a forward pass.",
}
_BY_KEY = (
    "key_requests_open",
    "key_requests_total",
    "key_rejected_total",
    "key_prompt_tokens_total",
    "key_generation_tokens_total",
    "key_wait_seconds_total",
)
_MAX_KEYS = 64  # Further keys share the label "other".
_HTTP = ("http_requests_in_flight", "http_requests_total")
_OF_PROCESS = (*_HTTP, "startup_seconds", "ready", "draining", "build_info")
# Further labels with the values that are known from the start: a series exists at 0 for each
# combination. () stands for values that are not known at the start.
_LABELS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "model_info": {"dtype": (), "device": (), "tp_size": ()},
    "startup_seconds": {"phase": ("load", "kv_alloc", "cuda_graph", "warm_up", "total")},
    "build_info": {"version": (), "commit": ()},
    "requests_total": {"outcome": ("stop", "length", "abort", "error", "rejected")},
    "requests_rejected_total": {"reason": ("queue_full", "loading", "draining", "failed")},
    "limits_exceeded_total": {"limit": LIMIT_NAMES},
    **{name: {"key": ()} for name in _BY_KEY},
    "http_requests_total": {"route": (), "method": (), "code": ()},
}

_Series = dict[tuple[str, ...], float]  # by label values
_Kind = TypeVar("_Kind", bound=MetricWrapperBase)


class Metrics:
    """Counts events of the API server, and renders the scrape. Use it in the event loop only."""

    def __init__(
        self,
        model_name: str,
        commit: str = "unknown",
        clock: Callable[[], float] = time.monotonic,
        keys: Iterable[str] = (),
    ) -> None:
        """keys: the names of all API keys. The first 64 have series of their own."""
        # The library otherwise adds a gauge with the creation time of each counter and histogram.
        prometheus_client.disable_created_metrics()
        self._registry = registry = CollectorRegistry()
        self._model_name = model_name
        self._clock = clock
        self._scrapes: dict[bool, tuple[float, bytes]] = {}
        self._open_http = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=_HIT_RATIO_REQS)
        self._stats = StatsCollector(model_name)
        registry.register(self._stats)
        self._gauges = _families(Gauge, _GAUGES, registry, model_name)
        self._counters = _families(Counter, _COUNTERS, registry, model_name)
        self._histograms = {
            name: Histogram(
                f"minisgl_{name}", text, ("model_name",), buckets=bounds, registry=registry
            ).labels(model_name)
            for name, (text, bounds) in HISTOGRAMS.items()
        }
        self._keys = {key: key for key in sorted({DEFAULT_CLIENT, *keys})[:_MAX_KEYS]}
        for name in _BY_KEY:
            for key in self._keys:
                {**self._counters, **self._gauges}[name].labels(model_name, key)
        # Tokens since the last scrape by client; adding to a counter costs 1 us.
        self._new_tokens: Counted[str] = Counted()
        self._set("scheduler_last_step_timestamp_seconds", time.time())
        self._gauges["build_info"].labels(minisgl.__version__, commit).set(1)
        text = "Unix time of the start of the API process."
        Gauge("process_start_time_seconds", text, registry=registry).set_to_current_time()

    def on_ready(self, message: messages.Ready, tp_size: int) -> None:
        """Record that a process has loaded. The scheduler's message has the facts of the model."""
        if message.facts is not None:
            facts = message.facts
            self._stats.page_size = facts.page_size
            self._set("model_info", 1, facts.dtype, facts.device, str(tp_size))
            for phase, seconds in message.startup_s.items():
                self.on_started(phase, seconds)

    def on_started(self, phase: str, seconds: float) -> None:
        self._gauges["startup_seconds"].labels(phase).set(seconds)

    def on_stats(self, stats: messages.SchedulerStats) -> None:
        if stats.step_id != self._stats.latest.step_id:
            self._set("scheduler_last_step_timestamp_seconds", time.time())
        self._stats.latest = stats

    def on_update(self, choice: Choice, update: messages.TextUpdate, now_s: float) -> None:
        """Count an update of the engine. Call this before the choice applies the update."""
        if not choice.prefill_done and update.admitted_s:
            self._count("prompt_tokens_total", choice.prompt_share)
            self._count("key_prompt_tokens_total", choice.prompt_share, self._key(choice.client))
            self._recent.append((update.prompt_tokens, update.cached_tokens))
            self._observe("request_queue_seconds", update.admitted_s - choice.started_s)
        tokens = update.completion_tokens - choice.latest.completion_tokens
        if tokens <= 0:
            return
        self._new_tokens[choice.client] += tokens
        if choice.first_s:
            self._observe("inter_token_latency_seconds", now_s - choice.last_s)
        else:
            choice.first_s = now_s
            wait_s = now_s - choice.started_s
            self._observe("time_to_first_token_seconds", wait_s)
            self._count("key_wait_seconds_total", wait_s, self._key(choice.client))
            if update.admitted_s:
                self._observe("request_prefill_seconds", now_s - update.admitted_s)
        choice.last_s = now_s

    def on_end(self, choice: Choice) -> None:
        """Count the end of a choice that reached the engine, also after a disconnect."""
        if choice.error is not None and error_reply(choice.error).status < 499:
            return
        finish = choice.finish or FinishReason.ABORT
        self._renew()
        self._count("requests_total", 1, finish.value)
        self._count("key_requests_total", 1, self._key(choice.client))
        if finish not in _COMPLETE or not choice.first_s:
            return
        decode_s, later_tokens = choice.last_s - choice.first_s, choice.latest.completion_tokens - 1
        self._observe("request_duration_seconds", choice.last_s - choice.started_s)
        self._observe("request_decode_seconds", decode_s)
        self._observe("request_prompt_tokens", choice.latest.prompt_tokens)
        self._observe("request_generation_tokens", choice.latest.completion_tokens)
        if later_tokens > 0:
            self._observe("time_per_output_token_seconds", decode_s / later_tokens)

    def on_limit(self, name: str) -> None:
        self._count("limits_exceeded_total", 1, name)
        self._renew()

    def on_refused(self, error: RequestError, phase: Phase, client: str = DEFAULT_CLIENT) -> None:
        """Count a call of a client that ended with this error response."""
        if error.limit is not None:
            self.on_limit(error.limit)
        if isinstance(error, Overloaded):
            closed = _REJECT_REASONS.get(phase, "draining")
            reason = closed if isinstance(error, NotReady) else "queue_full"
            self._count("requests_rejected_total", 1, reason)
            self._count("requests_total", 1, "rejected")
            self._count("key_rejected_total", 1, self._key(client))

    def on_failed(self) -> None:
        """Count a call that failed in the server before it reached the engine."""
        self._count("requests_total", 1, "error")

    def on_http(self, route: str, method: str, code: int) -> None:
        known = method if method in _METHODS else "other"
        self._counters["http_requests_total"].labels(route, known, str(code)).inc()

    def on_http_open(self, change: int) -> None:
        """+1: a request has arrived; -1: its response is complete; 0: a probe."""
        self._gauges["http_requests_in_flight"].inc(change)
        self._open_http += change
        if change:
            self._renew()

    def _renew(self) -> None:
        """Clear the cached scrape while at most one request is open, so that a test or a single
        client sees its own request in the next scrape."""
        if self._open_http <= 1:
            self._scrapes.clear()

    def render(
        self,
        accept: str,
        phase: Phase,
        is_stalled: bool,
        open_choices: int,
        open_by_client: Mapping[str, int] = MappingProxyType({}),
    ) -> tuple[bytes, str]:
        """The body of a scrape, and its content type.

        The scrape of a single client counts every response that the client has read. If requests
        overlap, the scrape may be up to CACHED_S old.
        """
        # Do not pass `accept` to the library, because it fails on a malformed version.
        is_openmetrics = _OPENMETRICS in accept
        encode, content_type = choose_encoder(_OPENMETRICS if is_openmetrics else "")
        now_s = self._clock()
        made_s, body = self._scrapes.get(is_openmetrics, (-inf, b""))
        if now_s - made_s >= CACHED_S:
            self._refresh(phase, is_stalled, open_choices)
            by_key = Counted(dict.fromkeys(self._keys, 0))
            for client, count in open_by_client.items():
                by_key[self._key(client)] += count
            for key, count in by_key.items():
                self._set("key_requests_open", count, key)
            body = encode(self._registry)
            self._scrapes[is_openmetrics] = now_s, body
        return body, content_type

    def _refresh(self, phase: Phase, is_stalled: bool, open_choices: int) -> None:
        self._gauges["ready"].set(phase is Phase.READY and not is_stalled)
        self._gauges["draining"].set(phase in (Phase.GRACE, Phase.DRAINING, Phase.CLOSED))
        self._count("generation_tokens_total", self._new_tokens.total())
        for client, tokens in self._new_tokens.items():
            self._count("key_generation_tokens_total", tokens, self._key(client))
        self._new_tokens.clear()
        looked_up = sum(tokens for tokens, _ in self._recent)
        found = sum(tokens for _, tokens in self._recent)
        self._set("prefix_cache_hit_ratio", found / looked_up if looked_up else 0)
        # The number of open choices is current here; the number that run is up to 50 ms old.
        running = min(self._stats.latest.running_reqs, open_choices)
        self._set("requests_running", running)
        self._set("requests_waiting", open_choices - running)

    def _key(self, client: str) -> str:
        return self._keys.get(client, "other")

    def _set(self, name: str, value: float, *labels: str) -> None:
        self._gauges[name].labels(self._model_name, *labels).set(value)

    def _count(self, name: str, amount: float, *labels: str) -> None:
        self._counters[name].labels(self._model_name, *labels).inc(amount)

    def _observe(self, name: str, amount: float) -> None:
        self._histograms[name].observe(amount)


class StatsCollector(Collector):
    """Makes metrics from the latest SchedulerStats at each scrape. The first values are 0."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.page_size = 0
        self.latest = messages.SchedulerStats()

    def collect(self) -> Iterator[Metric]:
        stats, size = self.latest, self.page_size
        used, pages = stats.locked_pages, stats.total_pages
        values = {
            "kv_cache_usage_ratio": used / pages if pages else 0,
            "kv_cache_page_size_tokens": size,
            "kv_cache_pages": pages,
            "prefix_cache_query_tokens_total": stats.prompt_tokens_total,
            "prefix_cache_hit_tokens_total": stats.cached_tokens_total,
            "prefix_cache_evicted_tokens_total": stats.evicted_pages_total * size,
            "preemptions_total": stats.preemptions_total,
            "nonfinite_rows_total": stats.nonfinite_rows_total,
        }
        for name, value in values.items():
            yield self._family(name, {(): value})
        states = {"used": used, "evictable": stats.evictable_pages, "free": stats.free_pages}
        tokens: _Series = {(state,): count * size for state, count in states.items()}
        yield self._family("kv_cache_tokens", tokens, "state")
        names, unused = messages.STEP_PHASES, messages.PhaseStats()
        phases = {name: stats.phases.get(name, unused) for name in names}
        passes: _Series = {(name, "true"): phase.graph_steps for name, phase in phases.items()}
        passes |= {(name, "false"): phase.eager_steps for name, phase in phases.items()}
        yield self._family("forward_passes_total", passes, "phase", "cuda_graph")
        seconds: _Series = {(name,): phase.seconds for name, phase in phases.items()}
        yield self._family("forward_seconds_total", seconds, "phase")
        reqs = {name: (phase.reqs_counts, phase.reqs) for name, phase in phases.items()}
        yield self._histogram("batch_size", messages.BATCH_SIZE_BOUNDS, reqs)
        batch_tokens = {name: (phase.tokens_counts, phase.tokens) for name, phase in phases.items()}
        yield self._histogram("batch_tokens", messages.BATCH_TOKENS_BOUNDS, batch_tokens)

    def _family(
        self, name: str, series: _Series, *labels: str
    ) -> CounterMetricFamily | GaugeMetricFamily:
        """A counter if the name ends in _total, otherwise a gauge."""
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = kind(f"minisgl_{name}", _OF_ENGINE[name], labels=("model_name", *labels))
        for values, value in series.items():
            family.add_metric((self._model_name, *values), value)
        return family

    def _histogram(
        self, name: str, bounds: Sequence[int], series: Mapping[str, tuple[Sequence[int], float]]
    ) -> HistogramMetricFamily:
        """series: the counts of the buckets and the sum, by phase."""
        labels = ("model_name", "phase")
        family = HistogramMetricFamily(f"minisgl_{name}", _OF_ENGINE[name], labels=labels)
        limits = [*(str(float(bound)) for bound in bounds), "+Inf"]
        for phase, (counts, total) in series.items():
            buckets = list(zip(limits, accumulate(counts), strict=True))
            family.add_metric((self._model_name, phase), buckets, total)
        return family


def _families(
    kind: type[_Kind], help_texts: Mapping[str, str], registry: CollectorRegistry, model_name: str
) -> dict[str, _Kind]:
    """Make these metrics, with their series at 0."""
    made = {}
    for name, text in help_texts.items():
        of_model = {} if name in _OF_PROCESS else {"model_name": (model_name,)}
        labels = {**of_model, **_LABELS.get(name, {})}
        family = kind(f"minisgl_{name}", text, tuple(labels), registry=registry)
        if labels:
            for values in product(*labels.values()):
                family.labels(*values)
        made[name] = family
    return made
