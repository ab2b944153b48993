"""What the scheduler counts, as metrics: made at each scrape from its latest stats."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from minisgl.message import (
    BATCH_SIZE_BOUNDS,
    BATCH_TOKENS_BOUNDS,
    STEP_PHASES,
    PhaseStats,
    SchedulerStats,
)


class StatsCollector(Collector):
    """What a registry asks at a scrape. Before there are stats, every series is there at 0."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.page_size = 0
        self.latest = SchedulerStats()

    def collect(self) -> Iterator[Metric]:
        stats, size, one = self.latest, self.page_size, self._one
        used, pages = stats.locked_pages, stats.total_pages
        tokens = (
            (("used",), used * size),
            (("evictable",), stats.evictable_pages * size),
            (("free",), stats.free_pages * size),
        )
        ratio = used / pages if pages else 0
        yield one("kv_cache_usage_ratio", "KV tokens held by requests, of all, 0 to 1.", ratio)
        yield one("kv_cache_page_size_tokens", "Tokens in a KV page.", size)
        yield one("kv_cache_pages", "KV pages.", pages)
        yield self._family("kv_cache_tokens", "KV tokens.", tokens, "state")
        asked, found = stats.prompt_tokens_total, stats.cached_tokens_total
        yield one("prefix_cache_query_tokens_total", "Prompt tokens, once per request.", asked)
        yield one("prefix_cache_hit_tokens_total", "Of those, tokens found in the cache.", found)
        evicted = stats.evicted_pages_total * size
        yield one("prefix_cache_evicted_tokens_total", "Tokens evicted from the cache.", evicted)
        preempted, wrong = stats.preemptions_total, stats.nonfinite_rows_total
        yield one("preemptions_total", "Running requests put back into the queue.", preempted)
        yield one("nonfinite_rows_total", "Rows of logits with NaN or infinity.", wrong)
        phases = {name: stats.phases.get(name, PhaseStats()) for name in STEP_PHASES}
        yield from self._of_steps(phases)

    def _of_steps(self, phases: Mapping[str, PhaseStats]) -> Iterator[Metric]:
        passes = (
            ((phase, by_graph), steps)
            for phase, of in phases.items()
            for by_graph, steps in (("true", of.graph_steps), ("false", of.eager_steps))
        )
        text = "Forward passes, run by a CUDA graph or not."
        yield self._family("forward_passes_total", text, passes, "phase", "cuda_graph")
        seconds = (((phase,), of.seconds) for phase, of in phases.items())
        yield self._family("forward_seconds_total", "Time in forward passes.", seconds, "phase")
        reqs = {phase: (of.reqs_counts, of.reqs) for phase, of in phases.items()}
        text = "Requests in a forward pass."
        yield self._histogram("batch_size", text, BATCH_SIZE_BOUNDS, reqs)
        tokens = {phase: (of.tokens_counts, of.tokens) for phase, of in phases.items()}
        text = "Tokens of a forward pass."
        yield self._histogram("batch_tokens", text, BATCH_TOKENS_BOUNDS, tokens)

    def _one(self, name: str, text: str, value: float) -> Metric:
        return self._family(name, text, [((), value)])

    def _family(
        self, name: str, text: str, series: Iterable[tuple[tuple[str, ...], float]], *labels: str
    ) -> Metric:
        """Counters are those whose name says so. series: by the values of the labels."""
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = kind(f"minisgl_{name}", text, labels=("model_name", *labels))
        for values, value in series:
            family.add_metric((self._model_name, *values), value)
        return family

    def _histogram(
        self,
        name: str,
        text: str,
        bounds: Sequence[int],
        series: Mapping[str, tuple[Sequence[int], float]],
    ) -> Metric:
        """series: counts of the buckets, and the sum, by phase."""
        family = HistogramMetricFamily(f"minisgl_{name}", text, labels=("model_name", "phase"))
        limits = [*(str(float(bound)) for bound in bounds), "+Inf"]
        for phase, (counts, total) in series.items():
            buckets = list(zip(limits, accumulate(counts), strict=True))
            family.add_metric((self._model_name, phase), buckets, total)
        return family
