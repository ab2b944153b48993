"""The metrics that are made from the stats of the scheduler."""

import re

import msgspec

from minisgl.message.messages import Ready, SchedulerStats
from minisgl.message.stats import BATCH_SIZE_BOUNDS, BATCH_TOKENS_BOUNDS, ImageTotals, PhaseStats
from minisgl.server.observe.metrics import Metrics
from tests.unit.server.fakes import FACTS
from tests.unit.server.test_metrics import scraped, stats

OF_ENGINE = re.compile("minisgl_(kv_|prefix_|preemptions_|nonfinite_|forward_|batch_)")
MIXED = PhaseStats(
    eager_steps=3,
    graph_steps=4,
    seconds=1.5,
    reqs=11,
    tokens=40,
    reqs_counts=[2, 0, 5, *(0 for _ in BATCH_SIZE_BOUNDS[3:]), 1],
    tokens_counts=[7, 1, *(0 for _ in BATCH_TOKENS_BOUNDS[1:])],
)


def collected(latest: SchedulerStats) -> dict[str, float]:
    """A scrape after these stats, with a page size of 16."""
    metrics = Metrics("m")
    metrics.on_ready(Ready(role="scheduler", facts=FACTS), tp_size=1)
    metrics.on_stats(latest)
    return scraped(metrics)


def test_buckets_are_cumulative() -> None:
    found = collected(msgspec.structs.replace(stats(), phases={"mixed": MIXED}))

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
    before = scraped(Metrics("m"))
    after = collected(msgspec.structs.replace(stats(step_id=1), phases={"mixed": MIXED}))
    assert {value for name, value in before.items() if OF_ENGINE.match(name)} == {0}
    assert before.keys() == {name for name in after if not name.startswith("minisgl_model_info")}


def test_kv_usage_counts_locked_tokens_only() -> None:
    found = collected(stats(total_pages=10, locked_pages=1, evictable_pages=7, free_pages=2))
    assert found["minisgl_kv_cache_usage_ratio{model_name=m}"] == 0.1
    name = "minisgl_kv_cache_tokens{{model_name=m,state={}}}"
    states = [found[name.format(state)] for state in ("used", "evictable", "free")]
    assert states == [16, 112, 32]


def test_snapshots_of_states_are_counted() -> None:
    found = collected(stats(kind_totals={"states": {"saved": 3, "loaded": 2, "evicted": 1}}))
    name = "minisgl_state_snapshots_total{{event={},model_name=m}}"
    assert [found[name.format(event)] for event in ("saved", "loaded", "evicted")] == [3, 2, 1]


def test_the_host_cache_has_tokens_by_state_and_bytes_by_direction() -> None:
    found = collected(
        stats(
            host_pages={"copied": 1, "host": 2, "moving": 3, "free": 4},
            host_totals={
                "bytes_to_host": 5,
                "bytes_to_gpu": 6,
                "hit_pages": 7,
                "evicted_pages": 8,
            },
            loading_reqs=9,
        )
    )
    name = "minisgl_host_cache_tokens{{model_name=m,state={}}}"
    states = [found[name.format(state)] for state in ("copied", "host", "moving", "free")]
    assert states == [16, 32, 48, 64]
    name = "minisgl_host_cache_copied_bytes_total{{direction={},model_name=m}}"
    assert [found[name.format(direction)] for direction in ("to_host", "to_gpu")] == [5, 6]
    totals = "hit_tokens_total", "evicted_tokens_total", "loading_requests"
    names = [f"minisgl_host_cache_{total}{{model_name=m}}" for total in totals]
    assert [found[name] for name in names] == [112, 128, 9]


def test_images_and_the_rows_of_their_buffer_are_counted() -> None:
    found = collected(stats(images=ImageTotals(encoded=3, patches=48, reused=2, rows=20, used=12)))
    names = "images_encoded_total", "image_patches_total", "images_reused_total"
    assert [found[f"minisgl_{name}{{model_name=m}}"] for name in names] == [3, 48, 2]
    name = "minisgl_image_buffer_tokens{{model_name=m,state={}}}"
    assert [found[name.format(state)] for state in ("used", "free")] == [12, 8]


def test_tokens_of_windows_have_the_same_states() -> None:
    found = collected(stats(kind_pages={"window": (3, 2, 5)}))
    name = "minisgl_kv_window_tokens{{model_name=m,state={}}}"
    assert [found[name.format(state)] for state in ("used", "evictable", "free")] == [48, 32, 80]
