"""Counts the events of the API server, and renders the scrape.

metrics.toml declares every metric. The API server counts requests itself, so that each number is
exact in a scrape that is encoded after the client has read the response. The numbers of the engine
come from the latest SchedulerStats at each scrape. The table for readers is in docs/operations.md.
"""

import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, product
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import msgspec
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

import minisgl
from minisgl.core import FinishReason, ImageRefused, ModelFacts, Overloaded, RequestError
from minisgl.message import messages
from minisgl.message.stats import BATCH_SIZE_BOUNDS, BATCH_TOKENS_BOUNDS, STEP_PHASES, PhaseStats
from minisgl.request.call import Call, priority_class
from minisgl.request.choice import Choice
from minisgl.server.errors import NotReady, error_reply
from minisgl.server.observe.lifecycle import Phase
from minisgl.settings.config import DEFAULT_CLIENT

# Encoding a scrape takes 1.8 ms of the event loop, in OpenMetrics 2.9 ms. The scrape of a format is
# reused for CACHED_S. Encoding therefore takes at most 5 % of the loop, with any number of clients.
CACHED_S = 0.1
_HIT_RATIO_REQS = 1000
_MAX_CLIENTS = 64  # further clients share the value "other" of the label key

_OPENMETRICS = "application/openmetrics-text"
_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS"})
_REJECT_REASONS = {Phase.LOADING: "loading", Phase.FAILED: "failed"}
_COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)
_FAMILIES: Mapping[str, Any] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}

_Labels = tuple[str, ...]  # the values of a metric's labels


class _Metric(msgspec.Struct, forbid_unknown_fields=True):
    """One entry of metrics.toml, which explains the fields."""

    help: str
    labels: dict[str, list[str]] = {}
    of_model: bool = True
    servers: Literal["engine", "render", "all"] = "engine"
    buckets: str | None = None
    stats: str | None = None


class _Declarations(msgspec.Struct, forbid_unknown_fields=True):
    """All of metrics.toml."""

    gauge: dict[str, _Metric]
    counter: dict[str, _Metric]
    histogram: dict[str, _Metric]
    buckets: dict[str, list[float]]


class _Histogram(msgspec.Struct):
    """counts[i]: values up to bounds[i] and above the bound before; the last: above all bounds."""

    bounds: Sequence[float]
    counts: list[int]
    total: float = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Metrics(Collector):
    """All metrics of one server. Use it in the event loop only.

    _numbers, _histograms: the values of each metric by its labels without model_name.
    _of_stats: for the metrics with `stats`, the functions that read the value of SchedulerStats.
    """

    def __init__(
        self,
        model_name: str,
        commit: str = "unknown",
        clock: Callable[[], float] = time.monotonic,
        clients: Iterable[str] = (),
        render_only: bool = False,
    ) -> None:
        """clients: the names of keys with series of their own, at most 64. Others are "other".

        render_only: export the metrics of a server without an engine.
        """
        declared = Path(__file__).with_name("metrics.toml").read_bytes()
        self._declared = msgspec.toml.decode(declared, type=_Declarations)
        self._servers = ("all", "render" if render_only else "engine")
        self._model_name = model_name
        self._clock = clock
        self._started_s = time.time()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._scrapes: dict[bool, tuple[float, bytes]] = {}
        self.open_http = 0  # requests without a complete response, probes excluded
        self._recent: deque[tuple[int, int]] = deque(maxlen=_HIT_RATIO_REQS)
        self._stats = messages.SchedulerStats()
        self._page_size = 0
        self._tool_format = ModelFacts.NO_TOOLS
        self._clients = frozenset(sorted({DEFAULT_CLIENT, *clients})[:_MAX_CLIENTS])
        known = {"key": self._clients}
        self._numbers: dict[str, defaultdict[_Labels, float]] = {}
        declared_numbers = self._declared.gauge | self._declared.counter
        self._of_stats: dict[str, Callable[[messages.SchedulerStats], float]] = {}
        for name, metric in declared_numbers.items():
            if metric.stats is not None:
                self._of_stats[name] = attrgetter(metric.stats)
            series = product(*(known.get(label, names) for label, names in metric.labels.items()))
            self._numbers[name] = defaultdict(float, dict.fromkeys(series, 0.0))
        self._histograms: dict[str, dict[_Labels, _Histogram]] = {}
        for name, metric in self._declared.histogram.items():
            bounds = self._declared.buckets.get(metric.buckets or "", [])
            self._histograms[name] = {(): _Histogram(bounds, [0] * (len(bounds) + 1))}
        self._set("scheduler_last_step_timestamp_seconds", self._started_s)
        self._set("build_info", 1, minisgl.__version__, commit)

    def on_ready(self, message: messages.Ready, tp_size: int) -> None:
        """Record that a process has loaded. The scheduler's message has the facts of the model."""
        if message.facts is not None:
            facts = message.facts
            self._page_size = facts.page_size
            self._set("model_info", 1, facts.dtype, facts.device, str(tp_size))
        if message.tool_format is not None:
            self._tool_format = message.tool_format
            self._count_calls(0, 0)

    def _count_calls(self, calls: int, failures: int) -> None:
        self.count("tool_calls_total", calls, self._tool_format)
        self.count("tool_call_failures_total", failures, self._tool_format)

    def on_started(self, seconds: Mapping[str, float]) -> None:
        """Record the seconds of each phase of the start."""
        for phase, phase_s in seconds.items():
            self._set("startup_seconds", phase_s, phase)

    def on_stats(self, stats: messages.SchedulerStats) -> None:
        if stats.step_id != self._stats.step_id:
            self._set("scheduler_last_step_timestamp_seconds", time.time())
        self._stats = stats

    def on_update(
        self, call: Call, choice: Choice, update: messages.TextUpdate, now_s: float
    ) -> None:
        """Count an update of the engine. Call this before the choice applies the update."""
        if not choice.prefill_done and update.admitted_s:
            self.count("prompt_tokens_total", choice.prompt_share)
            self.count(
                "key_prompt_tokens_total", choice.prompt_share, self._key(call.caller.client)
            )
            self._recent.append((update.prompt_tokens, update.cached_tokens))
            self._observe("request_queue_seconds", update.admitted_s - call.started_s)
        if update.calls or update.call_failures:
            self._count_calls(sum(bool(part.id) for part in update.calls), update.call_failures)
        tokens = update.completion_tokens - choice.latest.completion_tokens
        if tokens <= 0:
            return
        self.count("generation_tokens_total", tokens)
        self.count("key_generation_tokens_total", tokens, self._key(call.caller.client))
        if choice.first_s:
            self._observe("inter_token_latency_seconds", now_s - choice.last_s)
        else:
            choice.first_s = now_s
            wait_s = now_s - call.started_s
            self._observe("time_to_first_token_seconds", wait_s)
            self.count("key_wait_seconds_total", wait_s, self._key(call.caller.client))
            self.count("class_wait_seconds_total", wait_s, priority_class(call.caller.priority))
            if update.admitted_s:
                self._observe("request_prefill_seconds", now_s - update.admitted_s)
        choice.last_s = now_s

    def on_end(self, call: Call, choice: Choice) -> None:
        """Count the end of a choice that reached the engine, also after a disconnect."""
        if choice.error is not None and error_reply(choice.error).status < 499:
            return
        finish = choice.finish or FinishReason.ABORT
        self.count("requests_total", 1, finish.value)
        self.count("key_requests_total", 1, self._key(call.caller.client))
        self.count("class_requests_total", 1, priority_class(call.caller.priority))
        if finish not in _COMPLETE or not choice.first_s:
            return
        decode_s, later_tokens = choice.last_s - choice.first_s, choice.latest.completion_tokens - 1
        self._observe("request_duration_seconds", choice.last_s - call.started_s)
        self._observe("request_decode_seconds", decode_s)
        self._observe("request_prompt_tokens", choice.latest.prompt_tokens)
        self._observe("request_generation_tokens", choice.latest.completion_tokens)
        if later_tokens > 0:
            self._observe("time_per_output_token_seconds", decode_s / later_tokens)

    def on_images(self, images: int, decode_s: float) -> None:
        """Count the images of a request that a tokenizer has decoded."""
        self.count("images_total", images)
        self.count("image_decode_seconds_total", decode_s)

    def on_limit(self, name: str) -> None:
        self.count("limits_exceeded_total", 1, name)

    def on_refused(self, error: RequestError, phase: Phase, client: str = DEFAULT_CLIENT) -> None:
        """Count a call of a client that ended with this error response."""
        if error.limit is not None:
            self.on_limit(error.limit)
        if isinstance(error, ImageRefused):
            self.count("images_refused_total", 1, error.reason)
        if isinstance(error, Overloaded):
            closed = _REJECT_REASONS.get(phase, "draining")
            reason = closed if isinstance(error, NotReady) else "queue_full"
            self.count("requests_rejected_total", 1, reason)
            self.count("requests_total", 1, "rejected")
            self.count("key_rejected_total", 1, self._key(client))

    def on_http(self, route: str, method: str, code: int) -> None:
        known = method if method in _METHODS else "other"
        self.count("http_requests_total", 1, route, known, str(code))

    def render(
        self, accept: str, phase: Phase, is_stalled: bool, open_choices: Mapping[str, int]
    ) -> tuple[bytes, str]:
        """The body of a scrape, and its content type.

        open_choices: the number of each client.

        The scrape is up to CACHED_S old.
        """
        # Do not pass `accept` to the library, because it fails on a malformed version.
        is_openmetrics = _OPENMETRICS in accept
        encode, content_type = choose_encoder(_OPENMETRICS if is_openmetrics else "")
        now_s = self._clock()
        made_s, body = self._scrapes.get(is_openmetrics, (-inf, b""))
        if now_s - made_s >= CACHED_S:
            self._refresh(phase, is_stalled, open_choices)
            body = encode(self._registry)
            self._scrapes[is_openmetrics] = now_s, body
        return body, content_type

    def _refresh(self, phase: Phase, is_stalled: bool, open_choices: Mapping[str, int]) -> None:
        """Set the gauges of the server, and the metrics of the engine to its latest stats.

        The first values of the engine are 0.
        """
        is_ready = phase is Phase.READY and not is_stalled
        self._set("ready", is_ready)
        self._set("render_ready", is_ready)
        self._set("draining", phase in (Phase.GRACE, Phase.DRAINING, Phase.CLOSED))
        self._set("http_requests_in_flight", self.open_http)
        looked_up = sum(tokens for tokens, _ in self._recent)
        hits = sum(tokens for _, tokens in self._recent)
        self._set("prefix_cache_hit_ratio", hits / looked_up if looked_up else 0)
        # The number of open choices is current. The number of running requests is up to 50 ms old.
        total = sum(open_choices.values())
        running = min(self._stats.running_reqs, total)
        self._set("requests_running", running)
        self._set("requests_waiting", total - running)
        for key in (*self._clients, "other"):
            self._set("key_requests_open", 0, key)
        for client, count in open_choices.items():
            self.count("key_requests_open", count, self._key(client))
        stats, size = self._stats, self._page_size
        used, pages = stats.locked_pages, stats.total_pages
        self._set("kv_cache_usage_ratio", used / pages if pages else 0)
        self._set("kv_cache_page_size_tokens", size)
        held = used, stats.evictable_pages, stats.free_pages
        of_windows = stats.kind_pages.get("window", (0, 0, 0))
        states = ("used", "evictable", "free")
        for state, count, of_window in zip(states, held, of_windows, strict=True):
            self._set("kv_cache_tokens", count * size, state)
            self._set("kv_window_tokens", of_window * size, state)
        for name, value_of in self._of_stats.items():
            self._set(name, value_of(stats))
        self._set("prefix_cache_evicted_tokens_total", stats.evicted_pages_total * size)
        self._set("prefix_cache_ended_tokens_total", stats.ended_pages_total * size)
        of_states = stats.kind_totals.get("states", {})
        for event in ("saved", "loaded", "evicted"):
            self._set("state_snapshots_total", of_states.get(event, 0), event)
        for state in ("copied", "host", "moving", "free"):
            self._set("host_cache_tokens", stats.host_pages.get(state, 0) * size, state)
        host = stats.host_totals
        for direction in ("to_host", "to_gpu"):
            copied_bytes = host.get(f"bytes_{direction}", 0)
            self._set("host_cache_copied_bytes_total", copied_bytes, direction)
        self._set("host_cache_hit_tokens_total", host.get("hit_pages", 0) * size)
        self._set("host_cache_evicted_tokens_total", host.get("evicted_pages", 0) * size)
        images = stats.images
        self._set("image_buffer_tokens", images.used, "used")
        self._set("image_buffer_tokens", images.rows - images.used, "free")
        counted = zip(stats.drafts.drafted, stats.drafts.accepted, strict=True)
        for position, (drafted, accepted) in enumerate(counted, 1):
            self._set("draft_tokens_total", drafted, str(position))
            self._set("draft_tokens_accepted_total", accepted, str(position))
        self._set("kv_event_blocks_total", stats.kv_events.stored, "stored")
        self._set("kv_event_blocks_total", stats.kv_events.removed, "removed")
        for reason, count in stats.constraints.failures.items():
            self._set("grammar_failures_total", count, reason)
        self._histograms["batch_size"] = of_sizes = {}
        self._histograms["batch_tokens"] = of_tokens = {}
        for name in STEP_PHASES:
            found = stats.phases.get(name, PhaseStats())
            self._set("forward_passes_total", found.graph_steps, name, "true")
            self._set("forward_passes_total", found.eager_steps, name, "false")
            self._set("forward_seconds_total", found.seconds, name)
            of_sizes[name,] = _Histogram(BATCH_SIZE_BOUNDS, found.reqs_counts, found.reqs)
            of_tokens[name,] = _Histogram(BATCH_TOKENS_BOUNDS, found.tokens_counts, found.tokens)

    def collect(self) -> Iterator[Metric]:
        """Every metric of this kind of server with its series, for prometheus_client."""
        series: Mapping[str, Mapping[_Labels, Any]] = {**self._numbers, **self._histograms}
        for kind, family in _FAMILIES.items():
            entries: dict[str, _Metric] = getattr(self._declared, kind)
            for name, entry in entries.items():
                if entry.servers not in self._servers:
                    continue
                model = {"model_name": self._model_name} if entry.of_model else {}
                metric = family(f"minisgl_{name}", entry.help, labels=[*entry.labels, *model])
                for values, value in series[name].items():
                    labels = [*values, *model.values()]
                    if kind == "histogram":
                        bounds = [*(str(float(bound)) for bound in value.bounds), "+Inf"]
                        buckets = [*zip(bounds, accumulate(value.counts), strict=True)]
                        metric.add_metric(labels, buckets, value.total)
                    else:
                        metric.add_metric(labels, value)
                yield metric
        text = "Unix time of the start of the API process."
        yield GaugeMetricFamily("process_start_time_seconds", text, self._started_s)

    def _key(self, client: str) -> str:
        return client if client in self._clients else "other"

    def _set(self, name: str, value: float, *labels: str) -> None:
        self._numbers[name][labels] = value

    def count(self, name: str, amount: float, *labels: str) -> None:
        """Add to a counter. labels: the values of its labels without model_name."""
        self._numbers[name][labels] += amount

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name][()].add(value)
