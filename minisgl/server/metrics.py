"""Every metric of minisgl: its declaration, and what of the service's life it counts.

The API server counts requests by itself, so that each number is exact once its answer has been
read; of the engine it shows the scheduler's latest SchedulerStats. The table for readers is in
docs/operations.md.
"""

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import minisgl
from minisgl.core import FinishReason, Overloaded, RequestError
from minisgl.message import (
    BATCH_SIZE_BOUNDS,
    BATCH_TOKENS_BOUNDS,
    Ready,
    SchedulerStats,
    TextUpdate,
)
from minisgl.server.config import Limits
from minisgl.server.errors import NotReady, error_reply
from minisgl.server.exposition import Distribution, Exposition, Spec
from minisgl.server.lifecycle import Phase

if TYPE_CHECKING:
    from minisgl.server.client import Choice

_WINDOW_REQS = 1000
_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS"})
_REASONS = {Phase.LOADING: "loading", Phase.FAILED: "failed"}
_PHASES = ("prefill", "decode", "mixed")
# By their names in Limits; the context length is the engine's own.
LIMITS = (*Limits.__struct_fields__, "max_seq_len")
_COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)

_FIRST_S: tuple[float, ...] = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75)
_FIRST_S += (1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN_S: tuple[float, ...] = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04)
_BETWEEN_S += (0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
_WHOLE_S: tuple[float, ...] = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60)
_WHOLE_S += (120, 240, 480, 960, 1920)
_TOKENS = tuple(first * 10**power for power in range(6) for first in (1, 2, 5))


def _metric(
    name: str, text: str, bounds: tuple[float, ...] = (), **labels: tuple[str, ...]
) -> Spec:
    return Spec(name, text, labels, bounds)


# Each has the label model_name too: the first name that is served.
_OF_THE_MODEL = (
    _metric("minisgl_requests_running", "Requests in the batch."),
    _metric("minisgl_requests_waiting", "Requests accepted and not yet admitted."),
    _metric("minisgl_kv_cache_usage_ratio", "KV tokens held by requests, of all, 0 to 1."),
    _metric("minisgl_kv_cache_page_size_tokens", "Tokens in a KV page."),
    _metric("minisgl_kv_cache_pages", "KV pages."),
    _metric("minisgl_kv_cache_tokens", "KV tokens.", state=("used", "evictable", "free")),
    _metric("minisgl_prefix_cache_query_tokens_total", "Prompt tokens, once per request."),
    _metric("minisgl_prefix_cache_hit_tokens_total", "Of those, tokens found in the cache."),
    _metric("minisgl_prefix_cache_hit_ratio", f"Tokens found by the last {_WINDOW_REQS} requests."),
    _metric("minisgl_prefix_cache_evicted_tokens_total", "Tokens evicted from the cache."),
    _metric("minisgl_batch_size", "Requests in a forward pass.", BATCH_SIZE_BOUNDS, phase=_PHASES),
    _metric(
        "minisgl_batch_tokens", "Tokens of a forward pass.", BATCH_TOKENS_BOUNDS, phase=_PHASES
    ),
    _metric(
        "minisgl_forward_passes_total",
        "Forward passes, run by a CUDA graph or not.",
        phase=_PHASES,
        cuda_graph=("true", "false"),
    ),
    _metric("minisgl_forward_seconds_total", "Time in forward passes.", phase=_PHASES),
    _metric("minisgl_prompt_tokens_total", "Prompt tokens, each prompt once."),
    _metric("minisgl_generation_tokens_total", "Tokens generated."),
    _metric(
        "minisgl_requests_total",
        "Requests that ended; what clients did wrong does not count.",
        outcome=("stop", "length", "abort", "error", "rejected"),
    ),
    _metric(
        "minisgl_requests_rejected_total",
        "Requests refused with 503.",
        reason=("queue_full", "loading", "draining", "failed"),
    ),
    _metric(
        "minisgl_limits_exceeded_total", "Requests and connections over a limit.", limit=LIMITS
    ),
    _metric("minisgl_preemptions_total", "Running requests put back into the queue."),
    _metric("minisgl_nonfinite_rows_total", "Rows of logits with NaN or infinity."),
    _metric("minisgl_time_to_first_token_seconds", "Arrival to first output.", _FIRST_S),
    _metric("minisgl_inter_token_latency_seconds", "Between outputs.", _BETWEEN_S),
    _metric(
        "minisgl_time_per_output_token_seconds", "Mean of a request after the first.", _BETWEEN_S
    ),
    _metric("minisgl_request_duration_seconds", "Arrival to last output.", _WHOLE_S),
    _metric("minisgl_request_queue_seconds", "Arrival to first admission.", _WHOLE_S),
    _metric("minisgl_request_prefill_seconds", "First admission to first output.", _WHOLE_S),
    _metric("minisgl_request_decode_seconds", "First to last output.", _WHOLE_S),
    _metric("minisgl_request_prompt_tokens", "Prompt tokens of a request.", _TOKENS),
    _metric("minisgl_request_generation_tokens", "Tokens generated for a request.", _TOKENS),
    _metric("minisgl_scheduler_last_step_timestamp_seconds", "Unix time of the last step's end."),
    _metric("minisgl_model_info", "Always 1.", dtype=(), device=(), tp_size=()),
)
_OF_THE_PROCESS = (
    _metric("minisgl_http_requests_total", "HTTP answers.", route=(), method=(), code=()),
    _metric("minisgl_http_requests_in_flight", "HTTP requests but for probes, streams too."),
    _metric(
        "minisgl_startup_seconds",
        "How long each phase of the start took.",
        phase=("load", "kv_alloc", "cuda_graph", "warm_up", "total"),
    ),
    _metric("minisgl_ready", "1 when /readyz answers 200."),
    _metric("minisgl_draining", "1 from SIGTERM on."),
    _metric("minisgl_build_info", "Always 1.", version=(), commit=()),
    _metric("process_start_time_seconds", "Unix time of the start of the API process."),
)


def declared(model_name: str) -> tuple[Spec, ...]:
    """All metrics of a server of this model."""
    labelled = (
        spec._replace(labels={"model_name": (model_name,), **spec.labels}) for spec in _OF_THE_MODEL
    )
    return (*labelled, *_OF_THE_PROCESS)


class Now(NamedTuple):
    """State of the service at the time of a scrape."""

    phase: Phase
    stuck: bool
    open_choices: int


class Metrics:
    """Told of what happens; `render` gives it to whoever scrapes. In the API server's loop."""

    def __init__(self, model_name: str, commit: str = "unknown") -> None:
        self._model_name = model_name
        self._exposition = Exposition(declared(model_name))
        self._stats: SchedulerStats | None = None
        self._page_size = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=_WINDOW_REQS)
        self._first = self._distribution("minisgl_time_to_first_token_seconds")
        self._between = self._distribution("minisgl_inter_token_latency_seconds")
        self._generated = self._exposition.value("minisgl_generation_tokens_total", model_name)
        self._exposition.value("process_start_time_seconds").value = time.time()
        self._exposition.value("minisgl_build_info", minisgl.__version__, commit).value = 1
        self._set("minisgl_scheduler_last_step_timestamp_seconds", time.time())

    # --- what happens ---------------------------------------------------------------------------

    def on_ready(self, message: Ready, tp_size: int) -> None:
        """The scheduler has loaded."""
        if message.facts is not None:
            facts = message.facts
            self._page_size = facts.page_size
            self._set("minisgl_kv_cache_page_size_tokens", facts.page_size)
            self._set("minisgl_model_info", 1, facts.dtype, facts.device, str(tp_size))
            for phase, seconds in message.startup_s.items():
                self.on_started(phase, seconds)

    def on_started(self, phase: str, seconds: float) -> None:
        """This phase of the start took so long."""
        self._exposition.value("minisgl_startup_seconds", phase).value = seconds

    def on_stats(self, stats: SchedulerStats) -> None:
        if stats.step_id and (self._stats is None or stats.step_id != self._stats.step_id):
            self._set("minisgl_scheduler_last_step_timestamp_seconds", time.time())
        self._stats = stats

    def on_update(self, choice: "Choice", update: TextUpdate, now_s: float) -> None:
        """The engine says something of a choice, to which it is not applied yet."""
        if not choice.opened and update.admitted_s:
            self._count("minisgl_prompt_tokens_total", choice.prompt_share)
            self._recent.append((update.prompt_tokens, update.cached_tokens))
            self._observe("request_queue_seconds", update.admitted_s - choice.started_s)
        tokens = update.completion_tokens - choice.completion_tokens
        if tokens <= 0:
            return
        self._generated.value += tokens
        if choice.first_s:
            self._between.observe(now_s - choice.last_s)
        else:
            choice.first_s = now_s
            self._first.observe(now_s - choice.started_s)
            if update.admitted_s:
                self._observe("request_prefill_seconds", now_s - update.admitted_s)
        choice.last_s = now_s

    def on_end(self, choice: "Choice") -> None:
        """A choice that the engine had has ended, or is given up."""
        if choice.error is not None and error_reply(choice.error).status < 499:
            return
        finish = choice.finish or FinishReason.ABORT
        self._count("minisgl_requests_total", 1, finish.value)
        if finish not in _COMPLETE or not choice.first_s:
            return
        decode_s, later_tokens = choice.last_s - choice.first_s, choice.completion_tokens - 1
        self._observe("request_duration_seconds", choice.last_s - choice.started_s)
        self._observe("request_decode_seconds", decode_s)
        self._observe("request_prompt_tokens", choice.prompt_tokens)
        self._observe("request_generation_tokens", choice.completion_tokens)
        if later_tokens > 0:
            self._observe("time_per_output_token_seconds", decode_s / later_tokens)

    def on_limit(self, name: str) -> None:
        """Someone has exceeded this limit."""
        self._count("minisgl_limits_exceeded_total", 1, name)

    def on_refused(self, error: RequestError, phase: Phase) -> None:
        """A call has been answered with this error."""
        if error.limit is not None:
            self.on_limit(error.limit)
        if isinstance(error, Overloaded):
            closed = _REASONS.get(phase, "draining")
            reason = closed if isinstance(error, NotReady) else "queue_full"
            self._count("minisgl_requests_rejected_total", 1, reason)
            self._count("minisgl_requests_total", 1, "rejected")

    def on_failed(self) -> None:
        """A call has failed for a reason of ours, before the engine had it."""
        self._count("minisgl_requests_total", 1, "error")

    def on_http(self, route: str, method: str, code: int) -> None:
        """An answer has begun."""
        known = method if method in _METHODS else "other"
        self._exposition.value("minisgl_http_requests_total", route, known, str(code)).value += 1

    def on_http_open(self, change: int) -> None:
        """+1: a request has come; -1: its answer is complete."""
        self._exposition.value("minisgl_http_requests_in_flight").value += change

    # --- the scrape -----------------------------------------------------------------------------

    def render(self, accept: str, now: Now) -> tuple[bytes, str]:
        """The text and its content type; 0.2 ms."""
        ready = now.phase is Phase.READY and not now.stuck
        self._exposition.value("minisgl_ready").value = int(ready)
        draining = now.phase in (Phase.GRACE, Phase.DRAINING, Phase.CLOSED)
        self._exposition.value("minisgl_draining").value = int(draining)
        looked_up = sum(tokens for tokens, _ in self._recent)
        found = sum(tokens for _, tokens in self._recent)
        self._set("minisgl_prefix_cache_hit_ratio", found / looked_up if looked_up else 0)
        # How many are open is known here at once, which of them run up to 50 ms late.
        running = 0 if self._stats is None else min(self._stats.running_reqs, now.open_choices)
        self._set("minisgl_requests_running", running)
        self._set("minisgl_requests_waiting", now.open_choices - running)
        if self._stats is not None:
            self._show(self._stats)
        return self._exposition.render(accept)

    def _show(self, stats: SchedulerStats) -> None:
        size = self._page_size
        self._set("minisgl_kv_cache_pages", stats.total_pages)
        ratio = stats.locked_pages / stats.total_pages if stats.total_pages else 0
        self._set("minisgl_kv_cache_usage_ratio", ratio)
        self._set("minisgl_kv_cache_tokens", stats.locked_pages * size, "used")
        self._set("minisgl_kv_cache_tokens", stats.evictable_pages * size, "evictable")
        self._set("minisgl_kv_cache_tokens", stats.free_pages * size, "free")
        self._set("minisgl_prefix_cache_query_tokens_total", stats.prompt_tokens_total)
        self._set("minisgl_prefix_cache_hit_tokens_total", stats.cached_tokens_total)
        self._set("minisgl_prefix_cache_evicted_tokens_total", stats.evicted_pages_total * size)
        self._set("minisgl_preemptions_total", stats.preemptions_total)
        self._set("minisgl_nonfinite_rows_total", stats.nonfinite_rows_total)
        for phase, steps in stats.phases.items():
            self._set("minisgl_forward_passes_total", steps.eager_steps, phase, "false")
            self._set("minisgl_forward_passes_total", steps.graph_steps, phase, "true")
            self._set("minisgl_forward_seconds_total", steps.seconds, phase)
            sizes = self._distribution("minisgl_batch_size", phase)
            sizes.counts, sizes.sum = steps.reqs_counts, steps.reqs
            tokens = self._distribution("minisgl_batch_tokens", phase)
            tokens.counts, tokens.sum = steps.tokens_counts, steps.tokens

    def _set(self, name: str, value: float, *labels: str) -> None:
        self._exposition.value(name, self._model_name, *labels).value = value

    def _count(self, name: str, amount: int, *labels: str) -> None:
        self._exposition.value(name, self._model_name, *labels).value += amount

    def _observe(self, name: str, amount: float) -> None:
        self._distribution(f"minisgl_{name}").observe(amount)

    def _distribution(self, name: str, *labels: str) -> Distribution:
        return self._exposition.distribution(name, self._model_name, *labels)
