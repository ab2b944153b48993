"""Dashboards, alerts, autoscalers and the picker use only metrics of docs/operations.md."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.chart.helm import CHART, pick
from tests.chart.table import OPERATIONS, headings, metrics, names_in, rows, unknown_in
from tools.chart.dashboards import write_dashboards
from tools.chart.schema import OPEN

ROOT = CHART.parent
DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))
KEDA = {"autoscaling": {"keda": {"enabled": True, "prometheusAddress": "http://p:9090"}}}


def panels_of(path: Path) -> list[dict[str, object]]:
    return json.loads(path.read_text())["panels"]


def queries_of(path: Path) -> list[str]:
    board = json.loads(path.read_text())
    variables = [v["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    return [t["expr"] for p in board["panels"] for t in p.get("targets", [])] + variables


def test_table_is_well_formed():
    table = metrics()
    assert len(table) > 30
    for metric in table.values():
        assert metric.type in ("gauge", "counter", "histogram")
        assert metric.name.endswith("_total") == (metric.type == "counter"), metric.name
        assert re.fullmatch(r"(minisgl|process)(_[a-z0-9]+)+", metric.name)


def test_unknown_names_and_labels_are_found():
    assert unknown_in("minisgl_requests_queued") == ["minisgl_requests_queued"]
    assert unknown_in('minisgl_ready{model_name="x"}') == ["minisgl_ready{model_name}"]
    # The series of a histogram have the suffixes _bucket, _sum and _count.
    assert unknown_in("minisgl_batch_size") == ["minisgl_batch_size"]
    assert unknown_in("sum by (color) (minisgl_ready)") == ["by color"]
    assert unknown_in("sum by (pod, phase) (minisgl_startup_seconds)") == []


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda p: p.stem)
def test_dashboard_uses_known_metrics(path):
    queries = queries_of(path)
    assert all(names_in(query) for query in queries)
    assert {q: unknown_in(q) for q in queries if unknown_in(q)} == {}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda p: p.stem)
def test_dashboard_uses_its_variables(path):
    board = json.loads(path.read_text())
    names = [v["name"] for v in board["templating"]["list"]]
    assert names == ["datasource", "namespace", "model", "pod"]
    # Without allValue, "All" means the values that the query found. Metrics of the process have
    # no model label, so they are selected only by the pods that the query found.
    assert not any(v.get("allValue") for v in board["templating"]["list"])
    assert board["uid"] == path.stem
    for panel in panels_of(path):
        if panel["type"] == "row":
            continue
        assert panel["description"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            assert '{namespace=~"$namespace",pod=~"$pod"' in target["expr"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda p: p.stem)
def test_panels_do_not_overlap(path):
    taken = set()
    for panel in panels_of(path):
        box = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(box["x"], box["x"] + box["w"])
            for y in range(box["y"], box["y"] + box["h"])
        }
        assert not taken & cells, panel["title"]
        assert box["x"] + box["w"] <= 24
        taken |= cells


def test_dashboards_are_as_generated():
    written = write_dashboards()
    assert sorted(written) == DASHBOARDS
    for path, text in written.items():
        assert path.read_text() == text, "run: make chart"


def test_every_metric_is_on_a_dashboard_or_in_an_alert_except_four(render):
    values = {"prometheusRule": {"enabled": True}, "render": {"enabled": True}}
    rule = pick(render(values), "PrometheusRule")
    used = names_in(json.dumps(rule)) | names_in("".join(map(str, map(queries_of, DASHBOARDS))))
    elsewhere = {
        "minisgl_kv_cache_page_size_tokens",  # used by the endpoint picker
        "minisgl_kv_cache_pages",
        "minisgl_model_info",  # used in joins
        "minisgl_build_info",
    }
    silent = {m.name for m in metrics().values() if not m.series & used}
    assert silent == elsewhere


def test_alerts_use_known_metrics_of_this_release(render):
    values = {"prometheusRule": {"enabled": True, "alertLabels": {"team": "llm"}}}
    group = pick(render(values, name="chat"), "PrometheusRule")["spec"]["groups"][0]
    assert group["name"] == "llm.chat-minisgl"
    for rule in group["rules"]:
        assert unknown_in(rule["expr"]) == [], rule["alert"]
        selectors = re.findall(r"\{([^}]*)\}", rule["expr"])
        assert selectors
        for selector in selectors:
            assert selector.startswith('namespace="llm",pod=~"chat-minisgl-[a-z0-9]+-[a-z0-9]+"')
        assert rule["labels"]["team"] == "llm"


def test_every_alert_has_a_runbook_and_every_runbook_an_alert(render):
    values = {"prometheusRule": {"enabled": True}, "render": {"enabled": True}}
    rules = pick(render(values), "PrometheusRule")["spec"]["groups"]
    urls = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in rules[0]["rules"]}
    for alert, url in urls.items():
        page, _, anchor = url.partition("#")
        assert page.endswith("docs/operations.md")
        assert anchor in headings(), alert
    documented = {h for h in headings() if h.startswith("minisgl")}
    assert documented == {alert.lower() for alert in urls}


def test_a_release_without_pods_has_no_alert_for_missing_pods(render):
    """With replicas 0, MinisglNoReadyPod once fired after five minutes and never stopped."""

    def alerts(**values: object) -> set[str]:
        rule = pick(render({"prometheusRule": {"enabled": True}, **values}), "PrometheusRule")
        return {rule["alert"] for rule in rule["spec"]["groups"][0]["rules"]}

    assert alerts() - alerts(replicas=0) == {"MinisglNoReadyPod"}
    assert alerts(replicas=0, autoscaling={"hpa": {"enabled": True}}) == alerts()


def test_autoscalers_use_known_metrics(render):
    triggers = pick(render(KEDA), "ScaledObject")["spec"]["triggers"]
    assert [unknown_in(t["metadata"]["query"]) for t in triggers] == [[], []]
    hpa = pick(render({"autoscaling": {"hpa": {"enabled": True}}}), "HorizontalPodAutoscaler")
    names = [m["pods"]["metric"]["name"] for m in hpa["spec"]["metrics"]]
    assert set(names) == {"minisgl_requests_running", "minisgl_requests_waiting"}
    assert all(metrics()[name].type == "gauge" for name in names)


@pytest.mark.parametrize("file", ["config.yaml", "precise-config.yaml"])
def test_picker_reads_gauges_with_one_series_per_pod(file):
    config = yaml.safe_load((CHART / "endpoint-picker" / file).read_text())
    extractor = next(p for p in config["plugins"] if p["type"] == "core-metrics-extractor")
    engine = extractor["parameters"]["engineConfigs"][0]
    specs = {key: name for key, name in engine.items() if key.endswith("Spec")}
    assert len(specs) == 5
    for name in specs.values():
        assert metrics()[name].type == "gauge"
        assert metrics()[name].labels == {"model_name"}


def test_the_page_mentions_only_values_that_exist():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for path in re.findall(r"`([a-z]\w+(?:\.\w+)+)", OPERATIONS.read_text()):
        first = path.split(".")[0]
        if first in values and first not in OPEN:
            place = values
            for part in path.split("."):
                assert part in place, path
                place = place[part]


# Quotations in the troubleshooting table: messages of Kubernetes, Helm and the kernel, and messages
# of minisgl that contain a variable.
THEIRS = {
    "Insufficient nvidia.com/gpu",
    "node(s) had untolerated taint(s)",
    "RuntimeClass ... not found",
    "Unhealthy: Startup probe failed",
    "failed startup probe, will be restarted",
    "couldn't find key",
    "Usage of EmptyDir volume exceeds the limit",
    "No space left on device",
}
FILLED = {
    "ranks needs ... GiB for weights": "ranks needs {weights / _GIB:.1f} GiB for weights",
    "--max-connections ... is lowered": "--max-connections {limits.max_connections} is lowered",
    "was killed by SIGKILL": "was killed by {name}",
}


def test_messages_in_the_troubleshooting_table_occur_in_the_source():
    source = "".join(path.read_text() for path in (ROOT / "minisgl").rglob("*.py"))
    quoted = {words for row in rows("seen") for words in re.findall(r'"([^"]+)"', row[0])}
    assert quoted >= THEIRS | FILLED.keys()
    ours = quoted - THEIRS
    assert {words for words in ours if FILLED.get(words, words) not in source} == set()
    assert len(ours) > len(FILLED)
