"""The metrics that are made from the stats of the scheduler."""

import msgspec
from prometheus_client import CollectorRegistry

from minisgl.message.messages import BATCH_SIZE_BOUNDS, BATCH_TOKENS_BOUNDS, PhaseStats
from minisgl.server.metrics import StatsCollector
from tests.unit.server.test_metrics import stats, values

MIXED = PhaseStats(
    eager_steps=3,
    graph_steps=4,
    seconds=1.5,
    reqs=11,
    tokens=40,
    reqs_counts=[2, 0, 5, *(0 for _ in BATCH_SIZE_BOUNDS[3:]), 1],
    tokens_counts=[7, 1, *(0 for _ in BATCH_TOKENS_BOUNDS[1:])],
)


def collected(collector: StatsCollector) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(collector)
    return values(registry.collect())


def test_buckets_are_cumulative() -> None:
    collector = StatsCollector("m")
    collector.latest = msgspec.structs.replace(stats(), phases={"mixed": MIXED})
    found = collected(collector)

    def bucket(name: str, limit: str) -> float:
        return found[f"minisgl_batch_{name}_bucket{{le={limit},model_name=m,phase=mixed}}"]

    limits = ("1.0", "2.0", "4.0", "512.0", "+Inf")
    assert [bucket("size", limit) for limit in limits] == [2, 2, 7, 7, 8]
    assert [bucket("tokens", limit) for limit in ("1.0", "8.0", "+Inf")] == [7, 8, 8]
    of = "model_name=m,phase=mixed"
    for name, total in (("size", 11), ("tokens", 40)):
        assert found[f"minisgl_batch_{name}_count{{{of}}}"] == 8
        assert found[f"minisgl_batch_{name}_sum{{{of}}}"] == total
    assert found[f"minisgl_forward_seconds_total{{{of}}}"] == 1.5
    passes = [
        found[f"minisgl_forward_passes_total{{cuda_graph={g},{of}}}"] for g in ("true", "false")
    ]
    assert passes == [4, 3]


def test_every_series_exists_before_the_first_stats() -> None:
    before, after = StatsCollector("m"), StatsCollector("m")
    after.latest = msgspec.structs.replace(stats(step_id=1), phases={"mixed": MIXED})
    assert set(collected(before).values()) == {0}
    assert collected(before).keys() == collected(after).keys()


def test_kv_usage_counts_locked_tokens_only() -> None:
    collector = StatsCollector("m")
    collector.page_size = 16
    collector.latest = stats(total_pages=10, locked_pages=1, evictable_pages=7, free_pages=2)
    found = collected(collector)
    assert found["minisgl_kv_cache_usage_ratio{model_name=m}"] == 0.1
    name = "minisgl_kv_cache_tokens{{model_name=m,state={}}}"
    states = [found[name.format(state)] for state in ("used", "evictable", "free")]
    assert states == [16, 112, 32]
