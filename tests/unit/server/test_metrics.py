"""The form of the scrape, and the events that each metric counts."""

import asyncio
import itertools
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, Metric
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from minisgl.core import (
    Cancelled,
    EngineFailure,
    FinishReason,
    InvalidRequest,
    Overloaded,
    RequestError,
)
from minisgl.message.messages import Ready, SchedulerStats, TextUpdate, TokenizeResult, TokenizeText
from minisgl.message.stats import DraftTotals
from minisgl.request.question import Question
from minisgl.server.errors import NotReady, RanTooLong
from minisgl.server.observe.lifecycle import Phase
from minisgl.server.observe.metrics import CACHED_S, Metrics
from tests.unit.server.fakes import FACTS, World

TABLE = Path(__file__).resolve().parents[3] / "docs" / "operations.md"
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \|([^|]*)\|", re.MULTILINE)
# Arguments of a scrape: phase, is_stalled, open choices of each client.
Now = tuple[Phase, bool, dict[str, int]]
READY: Now = (Phase.READY, False, {})


def values(families: Iterable[Metric]) -> dict[str, float]:
    """The values by name and labels."""
    found = {}
    for family in families:
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            name = f"{sample.name}{{{labels}}}"
            assert name not in found, f"{name} occurs twice"
            found[name] = sample.value
    return found


def scraped(metrics: Metrics, now: Now = READY) -> dict[str, float]:
    return values(parse_text(metrics.render("", *now)[0].decode()))


def filled() -> Metrics:
    """Metrics with a value for each label, and a model name that needs escapes."""
    metrics = Metrics('a "quoted\\" name')
    metrics.on_ready(Ready(role="scheduler", facts=FACTS), tp_size=2)
    metrics.on_ready(Ready(role="tokenizer-0", tool_format="hermes"), tp_size=2)
    metrics.on_http("/v1/models/{model_id:path}", "GET", 404)
    metrics.on_refused(NotReady("x"), Phase.LOADING)
    return metrics


def _text(metrics: Metrics) -> str:
    return metrics.render("", *READY)[0].decode()


def exported() -> dict[str, Metric]:
    """The metrics of both kinds of servers, by the names of the documentation."""
    found = [*parse_text(_text(Metrics("m", render_only=True))), *parse_text(_text(filled()))]
    return {f.name + ("_total" if f.type == "counter" else ""): f for f in found}


# --- the form -----------------------------------------------------------------------------------


def test_both_formats_hold_the_same_series_and_values() -> None:
    metrics = filled()
    text, text_type = metrics.render("*/*", *READY)
    wanted = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3"
    modern, modern_type = metrics.render(wanted, *READY)
    assert (text_type, modern_type) == (CONTENT_TYPE_PLAIN_0_0_4, OPENMETRICS)
    assert modern.endswith(b"# EOF\n")
    assert values(parse_text(text.decode())) == values(parse_openmetrics(modern.decode()))


def test_each_metric_has_type_and_help_and_follows_the_naming_rules() -> None:
    found = exported()
    for metrics in (filled(), Metrics("m", render_only=True)):
        names = [family.name for family in parse_text(_text(metrics))]
        assert len(set(names)) == len(names), "no name occurs twice"
    for name, family in found.items():
        assert family.documentation.endswith(".")
        assert re.fullmatch(r"(minisgl|process)_[a-z0-9_]+", name)
        assert name.endswith("_total") == (family.type == "counter")
        assert family.type in ("counter", "gauge", "histogram")
        suffixes = {sample.name.removeprefix(name) for sample in family.samples}
        assert suffixes == ({"_bucket", "_count", "_sum"} if family.type == "histogram" else {""})


def test_endpoint_picker_finds_exactly_one_series_before_the_model_is_loaded() -> None:
    """The endpoint picker reads the first series of a metric, and takes an unknown type for 0."""
    families = {family.name: family for family in parse_text(_text(Metrics("m")))}
    for name in (
        "minisgl_requests_waiting",
        "minisgl_requests_running",
        "minisgl_kv_cache_usage_ratio",
        "minisgl_kv_cache_page_size_tokens",
        "minisgl_kv_cache_pages",
    ):
        assert families[name].type == "gauge"
        assert [sample.labels for sample in families[name].samples] == [{"model_name": "m"}]


def test_promtool_accepts_the_scrape() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip(reason="promtool (Debian package prometheus) is not installed")
    text = filled().render("", *READY)[0]
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_documented_table_is_what_is_exported() -> None:
    """Dashboards and alerts rely on docs/operations.md. A metric may have further labels."""
    rows = ROW.findall(TABLE.read_text(encoding="utf-8"))
    documented = {name: (kind, _labels(labels)) for name, kind, labels in rows}
    families = exported()
    assert {n: kind for n, (kind, _) in documented.items()} == {
        n: family.type for n, family in families.items()
    }
    for name, (_, labels) in documented.items():
        for sample in families[name].samples:
            assert labels <= sample.labels.keys(), name


def _labels(cell: str) -> set[str]:
    given = {label.strip() for label in cell.split(",") if label.strip()}
    return {"model_name" if label == "model" else label for label in given}


def test_scrape_is_encoded_once_in_a_tenth_of_a_second() -> None:
    """Regression: each refused connection cleared the scrape, and an attack encoded thousands."""
    time_s = 0.0
    metrics = Metrics("m", clock=lambda: time_s)
    failed = "minisgl_requests_total{model_name=m,outcome=error}"

    def counted() -> float:
        metrics.count("requests_total", 1, "error")
        return scraped(metrics)[failed]

    assert (counted(), counted()) == (1, 1)
    metrics.on_limit("max_head_bytes")
    metrics.open_http += 1
    metrics.open_http -= 1
    assert counted() == 1
    time_s = CACHED_S
    assert (counted(), counted()) == (4, 4)
    modern, _ = metrics.render(OPENMETRICS, *READY)
    assert values(parse_openmetrics(modern.decode()))[failed] == 5, (
        "each format has its own cached scrape"
    )


@pytest.mark.parametrize(
    "accept", ["application/openmetrics-text;version=x", "text/plain;version="]
)
def test_unknown_versions_of_a_format_get_a_known_one(accept: str) -> None:
    assert Metrics("m").render(accept, *READY)[1] in (OPENMETRICS, CONTENT_TYPE_PLAIN_0_0_4)


# --- requests -----------------------------------------------------------------------------------


def run(scenario, **limits: object) -> dict[str, float]:
    """Run a coroutine function on a World, and return the scrape after it."""

    async def main() -> dict[str, float]:
        world = World(**limits)
        await scenario(world)
        now = (Phase.READY, False, world.engine.open_choices)
        return scraped(world.engine.metrics, now)

    return asyncio.run(main())


def submitted(world: World, count: int = 1, request_id: str = "r"):
    generation = world.open(count, request_id)
    generation.submitted = True
    return generation


def outcomes(found: dict[str, float]) -> dict[str, float]:
    """The outcomes that are not 0."""
    pattern = re.compile(r"minisgl_requests_total\{model_name=m,outcome=(\w+)\}")
    return {m[1]: value for name, value in found.items() if (m := pattern.match(name)) and value}


def test_tokens_and_times_of_one_request() -> None:
    async def scenario(world: World) -> None:
        metrics, generation = world.engine.metrics, submitted(world)
        (choice,) = generation.choices
        choice.prompt_share = 40
        generation.started_s = 100.0
        common = {"prompt_tokens": 40, "cached_tokens": 32, "admitted_s": 100.2}

        def update(tokens: int, now_s: float) -> None:
            message = TextUpdate(uid=choice.uid, text="", completion_tokens=tokens, **common)
            metrics.on_update(generation, choice, message, now_s)
            generation.apply(message)

        update(1, 100.5)
        update(2, 100.53)
        update(4, 100.56)  # the text of the third was held back
        choice.finish = FinishReason.LENGTH
        metrics.on_end(generation, choice)

    found = run(scenario)

    def one(name: str) -> float:
        return found[f"minisgl_{name}{{model_name=m}}"]

    assert (one("prompt_tokens_total"), one("generation_tokens_total")) == (40, 4)
    assert one("time_to_first_token_seconds_sum") == pytest.approx(0.5)
    assert one("request_queue_seconds_sum") == pytest.approx(0.2)
    assert one("request_prefill_seconds_sum") == pytest.approx(0.3)
    assert one("inter_token_latency_seconds_count") == 2
    assert one("inter_token_latency_seconds_sum") == pytest.approx(0.06)
    assert one("request_decode_seconds_sum") == pytest.approx(0.06)
    assert one("time_per_output_token_seconds_sum") == pytest.approx(0.02)
    assert one("request_duration_seconds_sum") == pytest.approx(0.56)
    assert (one("request_prompt_tokens_sum"), one("request_generation_tokens_sum")) == (40, 4)
    assert one("prefix_cache_hit_ratio") == 0.8
    assert outcomes(found) == {"length": 1}


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR])
def test_each_choice_counts_once_by_its_finish(finish: FinishReason) -> None:
    async def scenario(world: World) -> None:
        generation = submitted(world, 2)
        for choice in generation.choices:
            world.update(choice.uid)
            world.finish(choice.uid, finish)
        world.engine.close(generation)
        world.engine.close(generation)

    assert outcomes(run(scenario)) == {finish.value: 2}


def test_closed_call_counts_once_as_aborted_and_in_no_duration() -> None:
    async def scenario(world: World) -> None:
        generation = submitted(world)
        world.update(generation.choices[0].uid)
        world.engine.close(generation)

    found = run(scenario)
    assert outcomes(found) == {"abort": 1}
    assert found["minisgl_request_duration_seconds_count{model_name=m}"] == 0
    assert found["minisgl_time_to_first_token_seconds_count{model_name=m}"] == 1


@pytest.mark.parametrize("kind", [EngineFailure, RanTooLong, Cancelled])
@pytest.mark.parametrize("all_of_them", [False, True])
def test_calls_ended_by_the_server(kind: type[RequestError], all_of_them: bool) -> None:
    """Regression: a call that its deadline ended counted as aborted, so that no alert saw it."""

    async def scenario(world: World) -> None:
        generation = submitted(world)
        if all_of_them:
            world.engine.fail_all(kind("x"))
        else:
            world.engine.end(generation, kind("x"))
        world.update(
            generation.choices[0].uid, "late"
        )  # sent before the end, and received before the close
        world.finish(generation.choices[0].uid)
        world.engine.close(generation)

    assert outcomes(run(scenario)) == {"abort" if kind is Cancelled else "error": 1}


def test_refusal_of_an_invalid_request_by_the_scheduler_is_not_an_error() -> None:
    async def scenario(world: World) -> None:
        (choice,) = submitted(world).choices
        world.update(choice.uid, finish=FinishReason.ERROR, error="x", error_kind="PromptTooLong")

    assert outcomes(run(scenario)) == {}


def test_failure_of_the_tokenizer_is_an_error() -> None:
    async def scenario(world: World) -> None:
        question = Question(TokenizeText(text="x"), "prompt")
        asking = asyncio.create_task(world.engine.ask(world.open(), question))
        await asyncio.sleep(0)
        (asked,) = world.tokenizers[0].sent
        world.engine.receive(TokenizeResult(uid=asked.uid, error="x", internal=True))
        with pytest.raises(EngineFailure):
            await asking

    assert outcomes(run(scenario)) == {"error": 1}


@pytest.mark.parametrize(
    ("error", "phase", "reason"),
    [
        (Overloaded("x"), Phase.READY, "queue_full"),
        (Overloaded("x"), Phase.GRACE, "queue_full"),
        (NotReady("x"), Phase.LOADING, "loading"),
        (NotReady("x"), Phase.DRAINING, "draining"),
        (NotReady("x"), Phase.FAILED, "failed"),
        (InvalidRequest("x"), Phase.READY, None),
    ],
)
def test_refusals_count_by_reason(error: RequestError, phase: Phase, reason: str | None) -> None:
    metrics = Metrics("m")
    metrics.on_refused(error, phase)
    found = scraped(metrics)
    pattern = re.compile(r"minisgl_requests_rejected_total\{model_name=m,reason=(\w+)\}")
    counted = {m[1] for name, value in found.items() if (m := pattern.match(name)) and value == 1}
    assert counted == ({reason} if reason else set())
    assert outcomes(found) == ({"rejected": 1} if reason else {})


def test_hit_ratio_covers_the_last_thousand_requests() -> None:
    async def scenario(world: World) -> None:
        for index in range(1500):
            (choice,) = submitted(world).choices
            cached = 0 if index < 1000 else 5
            world.update(choice.uid, prompt_tokens=10, cached_tokens=cached, admitted_s=1.0)
            world.finish(choice.uid)

    found = run(scenario, max_queued_reqs=2000)
    assert found["minisgl_prefix_cache_hit_ratio{model_name=m}"] == 0.25


# --- engine and service -------------------------------------------------------------------------


def stats(**fields: int) -> SchedulerStats:
    return SchedulerStats(busy=True, **fields)


def test_request_waits_until_the_stats_of_the_scheduler_count_it_as_running() -> None:
    metrics = Metrics("m", clock=itertools.count().__next__)  # one second between scrapes
    now = (Phase.READY, False, {"a": 2, "b": 3})

    def pair(now: Now) -> tuple[float, float]:
        found = scraped(metrics, now)
        names = ("minisgl_requests_running{model_name=m}", "minisgl_requests_waiting{model_name=m}")
        return found[names[0]], found[names[1]]

    assert pair(now) == (0, 5)
    metrics.on_stats(stats(running_reqs=3))
    assert pair(now) == (3, 2)
    assert pair((Phase.READY, False, {"a": 1})) == (1, 0), (
        "the other two have ended since the last stats"
    )


def test_drafts_are_counted_by_position() -> None:
    metrics = Metrics("m", clock=itertools.count().__next__)
    drafts = DraftTotals(drafted=[9, 7, 5, 0, 0, 0, 0], accepted=[6, 2, 0, 0, 0, 0, 0])
    metrics.on_stats(msgspec.structs.replace(stats(), drafts=drafts))
    found = scraped(metrics, (Phase.READY, False, {}))
    for name, expected in (("draft_tokens", [9, 7, 5]), ("draft_tokens_accepted", [6, 2, 0])):
        series = [f"minisgl_{name}_total{{model_name=m,position={i}}}" for i in (1, 2, 3)]
        assert [found[each] for each in series] == expected


@pytest.mark.parametrize(
    ("phase", "stalled", "ready", "draining"),
    [
        (Phase.LOADING, False, 0, 0),
        (Phase.READY, False, 1, 0),
        (Phase.READY, True, 0, 0),
        (Phase.GRACE, False, 0, 1),
        (Phase.DRAINING, False, 0, 1),
    ],
)
def test_ready_and_draining(phase: Phase, stalled: bool, ready: int, draining: int) -> None:
    found = scraped(Metrics("m"), (phase, stalled, {}))
    assert (found["minisgl_ready{}"], found["minisgl_draining{}"]) == (ready, draining)
