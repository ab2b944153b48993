"""Every metric of minisgl: what counts it, and the scrape.

The API server counts requests by itself (`declared.py`), so that each number is exact once its
answer has been read; of the engine it shows the scheduler's latest SchedulerStats (`stats.py`).
The table for readers is in docs/operations.md.
"""

import time
from collections import deque
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import choose_encoder

import minisgl
from minisgl.core import FinishReason, Overloaded, RequestError
from minisgl.message import Ready, SchedulerStats, TextUpdate
from minisgl.server.declared import COUNTERS, GAUGES, HISTOGRAMS, PHASES, WINDOW_REQS, families
from minisgl.server.errors import NotReady, error_reply
from minisgl.server.lifecycle import Phase
from minisgl.server.stats import StatsCollector

if TYPE_CHECKING:
    from minisgl.server.engine_client import Choice

# A text takes 1.8 ms of the event loop, as OpenMetrics 2.9: 2 or 3 % of it, whoever scrapes.
KEPT_S = 0.1
_OPENMETRICS = "application/openmetrics-text"
_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS"})
_REASONS = {Phase.LOADING: "loading", Phase.FAILED: "failed"}
_COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)


class Metrics:
    """Told of what happens; `render` gives it to whoever scrapes. In the API server's loop."""

    def __init__(
        self, model_name: str, commit: str = "unknown", clock: Callable[[], float] = time.monotonic
    ) -> None:
        disable_created_metrics()  # or each counter and histogram has a gauge of its birth
        self._registry = registry = CollectorRegistry()
        self._model_name = model_name
        self._clock = clock
        self._texts: dict[bool, tuple[float, bytes]] = {}
        self._open_http = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=WINDOW_REQS)
        self._stats = StatsCollector(model_name)
        registry.register(self._stats)
        self._gauges = families(Gauge, GAUGES, registry, model_name)
        self._counters = families(Counter, COUNTERS, registry, model_name)
        self._histograms = {
            name: Histogram(
                f"minisgl_{name}", text, ("model_name",), buckets=bounds, registry=registry
            ).labels(model_name)
            for name, (text, bounds) in HISTOGRAMS.items()
        }
        self._generated = self._counters["generation_tokens_total"].labels(model_name)
        self._set("scheduler_last_step_timestamp_seconds", time.time())
        self._answers = Counter(
            "minisgl_http_requests", "HTTP answers.", ("route", "method", "code"), registry=registry
        )
        text = "HTTP requests but for probes, streams too."
        self._in_flight = Gauge("minisgl_http_requests_in_flight", text, registry=registry)
        text = "How long each phase of the start took."
        self._startup = Gauge("minisgl_startup_seconds", text, ("phase",), registry=registry)
        for phase in PHASES:
            self._startup.labels(phase)
        self._ready = Gauge("minisgl_ready", "1 when /readyz answers 200.", registry=registry)
        self._draining = Gauge("minisgl_draining", "1 from SIGTERM on.", registry=registry)
        build = Gauge("minisgl_build_info", "Always 1.", ("version", "commit"), registry=registry)
        build.labels(minisgl.__version__, commit).set(1)
        text = "Unix time of the start of the API process."
        Gauge("process_start_time_seconds", text, registry=registry).set_to_current_time()

    def on_ready(self, message: Ready, tp_size: int) -> None:
        """The scheduler has loaded."""
        if message.facts is not None:
            facts = message.facts
            self._stats.page_size = facts.page_size
            self._set("model_info", 1, facts.dtype, facts.device, str(tp_size))
            for phase, seconds in message.startup_s.items():
                self.on_started(phase, seconds)

    def on_started(self, phase: str, seconds: float) -> None:
        self._startup.labels(phase).set(seconds)

    def on_stats(self, stats: SchedulerStats) -> None:
        if stats.step_id != self._stats.latest.step_id:
            self._set("scheduler_last_step_timestamp_seconds", time.time())
        self._stats.latest = stats

    def on_update(self, choice: "Choice", update: TextUpdate, now_s: float) -> None:
        """The engine says something of a choice, to which it is not applied yet."""
        if not choice.opened and update.admitted_s:
            self._count("prompt_tokens_total", choice.prompt_share)
            self._recent.append((update.prompt_tokens, update.cached_tokens))
            self._observe("request_queue_seconds", update.admitted_s - choice.started_s)
        tokens = update.completion_tokens - choice.latest.completion_tokens
        if tokens <= 0:
            return
        self._generated.inc(tokens)
        if choice.first_s:
            self._observe("inter_token_latency_seconds", now_s - choice.last_s)
        else:
            choice.first_s = now_s
            self._observe("time_to_first_token_seconds", now_s - choice.started_s)
            if update.admitted_s:
                self._observe("request_prefill_seconds", now_s - update.admitted_s)
        choice.last_s = now_s

    def on_end(self, choice: "Choice") -> None:
        """A choice that the engine had has ended, or is given up."""
        if choice.error is not None and error_reply(choice.error).status < 499:
            return
        finish = choice.finish or FinishReason.ABORT
        self._renew()
        self._count("requests_total", 1, finish.value)
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

    def on_refused(self, error: RequestError, phase: Phase) -> None:
        """A call has been answered with this error."""
        if error.limit is not None:
            self.on_limit(error.limit)
        if isinstance(error, Overloaded):
            closed = _REASONS.get(phase, "draining")
            reason = closed if isinstance(error, NotReady) else "queue_full"
            self._count("requests_rejected_total", 1, reason)
            self._count("requests_total", 1, "rejected")

    def on_failed(self) -> None:
        """A call has failed for a reason of ours, before the engine had it."""
        self._count("requests_total", 1, "error")

    def on_http(self, route: str, method: str, code: int) -> None:
        known = method if method in _METHODS else "other"
        self._answers.labels(route, known, str(code)).inc()

    def on_http_open(self, change: int) -> None:
        """+1: a request has come; -1: its answer is complete; 0: a probe."""
        self._in_flight.inc(change)
        self._open_http += change
        if change:
            self._renew()

    def _renew(self) -> None:
        """Who is alone finds all of an answer in the numbers that are asked for after it."""
        if self._open_http <= 1:
            self._texts.clear()

    def render(
        self, accept: str, phase: Phase, is_stalled: bool, open_choices: int
    ) -> tuple[bytes, str]:
        """The text, and its content type. It has every answer that a lone client has read; what
        overlapping requests count may be missing for KEPT_S."""
        # Not `accept` itself: the library fails on a version that is no number.
        modern = _OPENMETRICS in accept
        encode, content_type = choose_encoder(_OPENMETRICS if modern else "")
        now_s = self._clock()
        made_s, text = self._texts.get(modern, (-inf, b""))
        if now_s - made_s >= KEPT_S:
            self._refresh(phase, is_stalled, open_choices)
            text = encode(self._registry)
            self._texts[modern] = now_s, text
        return text, content_type

    def _refresh(self, phase: Phase, is_stalled: bool, open_choices: int) -> None:
        self._ready.set(phase is Phase.READY and not is_stalled)
        self._draining.set(phase in (Phase.GRACE, Phase.DRAINING, Phase.CLOSED))
        looked_up = sum(tokens for tokens, _ in self._recent)
        found = sum(tokens for _, tokens in self._recent)
        self._set("prefix_cache_hit_ratio", found / looked_up if looked_up else 0)
        # How many are open is known here at once, which of them run up to 50 ms late.
        running = min(self._stats.latest.running_reqs, open_choices)
        self._set("requests_running", running)
        self._set("requests_waiting", open_choices - running)

    def _set(self, name: str, value: float, *labels: str) -> None:
        self._gauges[name].labels(self._model_name, *labels).set(value)

    def _count(self, name: str, amount: int, *labels: str) -> None:
        self._counters[name].labels(self._model_name, *labels).inc(amount)

    def _observe(self, name: str, amount: float) -> None:
        self._histograms[name].observe(amount)
