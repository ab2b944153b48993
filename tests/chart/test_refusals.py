"""Values that the chart refuses, and the messages."""

import json
import re
from functools import reduce
from typing import Any

import jsonschema
import pytest
import yaml

from minisgl.settings.command_line import build_parser
from tests.chart.helm import CHART, ChartError, pick
from tests.chart.table import rows
from tests.chart.test_pod import container_of, flags_of
from tools.chart.schema import OPEN, documented_keys, undocumented, write_schema

VALUES = (CHART / "values.yaml").read_text()
DIGEST = "sha256:1"
BOTH_SCALERS = {
    "autoscaling": {"hpa": {"enabled": True}, "keda": {"enabled": True, "prometheusAddress": "p"}}
}
ONE_POD_CACHE = {"enabled": True}

CONTRADICTIONS = {
    "two sources": ({"model": {"id": "a/b", "image": "r/m"}}, "model.id and model.image"),
    "revision without id": ({"model": {"revision": "main"}}, "set model.id or remove it"),
    "path without volume": ({"model": {"path": "x"}}, "set model.existingClaim"),
    "offline without a cache": (
        {"model": {"id": "a/b"}, "huggingface": {"offline": True}},
        "set cache.enabled=true and cache.existingClaim to a claim",
    ),
    "download without egress": (
        {"model": {"id": "a/b"}, "networkPolicy": {"enabled": True, "allowHTTPS": False}},
        "allow a mirror of the hub in networkPolicy.extraEgress",
    ),
    "two hub tokens": ({"huggingface": {"token": "t", "existingSecret": "s"}}, "remove token"),
    "two API keys": ({"auth": {"apiKey": "k", "existingSecret": "s"}}, "remove apiKey"),
    "too few GPUs": (
        {"tensorParallelSize": 4, "gpu": {"count": 2}},
        "gpu.count is 2, but tensorParallelSize is 4",
    ),
    "too many GPUs": (
        {"tensorParallelSize": 2, "gpu": {"count": 4}},
        "so the other GPUs would stay idle: raise tensorParallelSize",
    ),
    "GPUs among the limits": (
        {"resources": {"limits": {"nvidia.com/gpu": 2}}},
        "remove them there and set tensorParallelSize",
    ),
    "GPUs among the requests": (
        {"resources": {"requests": {"nvidia.com/gpu": 2}}},
        "remove them there and set tensorParallelSize",
    ),
    "no GPU at all": ({"gpu": {"resourceName": ""}}, "set one of the two, or gpu.enabled=false"),
    "relative host path": ({"model": {"hostPath": "srv/m"}}, "begin it with a slash"),
    "address of the pod alone": (
        {"server": {"host": "localhost"}},
        "server.host is localhost, which is reachable only inside the pod",
    ),
    "more than all memory": (
        {"server": {"memoryRatio": 1.5}},
        "server.memoryRatio is 1.5, but it is a share",
    ),
    "more errors than requests": (
        {"prometheusRule": {"errorRatio": 1.5}},
        "prometheusRule.errorRatio is 1.5, but it is a share",
    ),
    "objective beyond the last bucket": (
        {"prometheusRule": {"ttftSeconds": 160}},
        "set a number above 0 and below 160",
    ),
    "flag of the chart": ({"extraArgs": ["--tp=4"]}, "set tensorParallelSize instead"),
    "port by flag": ({"extraArgs": ["--port", "80"]}, "set service.port instead"),
    "probe port by flag": (
        {"extraArgs": ["--probe-port", "80"]},
        "always use port 1920, which no Service exposes: remove the flag",
    ),
    "isolation without keys": (
        {"auth": {"cacheIsolation": "key"}},
        "set auth.keysSecret, or auth.cacheIsolation=none",
    ),
    "start budget below one probe": (
        {"startup": {"budgetSeconds": 10, "periodSeconds": 15}},
        "raise startup.budgetSeconds, or lower startup.periodSeconds",
    ),
    "scrape longer than its interval": (
        {"metrics": {"podMonitor": {"interval": "1m", "scrapeTimeout": "1m1ms"}}},
        "lower scrapeTimeout, or raise interval",
    ),
    "short grace period": (
        {"terminationGracePeriodSeconds": 30},
        "is 30, but preStop, drain and teardown take up to 90",
    ),
    "grace over drain": (
        {"drain": {"graceSeconds": 60, "timeoutSeconds": 60}},
        "raise drain.timeoutSeconds",
    ),
    "rollout without room": (
        {"strategy": {"maxSurge": 0, "maxUnavailable": "0%"}},
        "a rollout could not replace any pod",
    ),
    "surge on one disk": (
        {"strategy": {"maxSurge": 1}, "cache": ONE_POD_CACHE},
        "set strategy.maxSurge=0 or cache.accessModes=[ReadWriteMany]",
    ),
    "replicas on one disk": ({"replicas": 2, "cache": ONE_POD_CACHE}, "Up to 2 pods would share"),
    "scaling on one disk": (
        {"autoscaling": {"hpa": {"enabled": True}}, "cache": ONE_POD_CACHE},
        "Up to 4 pods would share",
    ),
    "render pods on one disk": (
        {"render": {"enabled": True}, "cache": ONE_POD_CACHE},
        "render.enabled adds pods that would share a cache",
    ),
    "two autoscalers": (BOTH_SCALERS, "both would change the number of replicas"),
    "KEDA without Prometheus": (
        {"autoscaling": {"keda": {"enabled": True}}},
        "set autoscaling.keda.prometheusAddress",
    ),
    "minimum above maximum": (
        {"autoscaling": {"minReplicas": 9}},
        "lower minReplicas or raise maxReplicas",
    ),
    "two budgets": (
        {"podDisruptionBudget": {"minAvailable": 1}},
        "set the other to null",
    ),
    "budget of all pods": (
        {"podDisruptionBudget": {"minAvailable": 2, "maxUnavailable": None}, "replicas": 2},
        "no node could ever be drained",
    ),
    "budget of all pods in percent": (
        {"podDisruptionBudget": {"minAvailable": "67%", "maxUnavailable": None}, "replicas": 3},
        "no node could ever be drained",
    ),
    "budget without missing pods": (
        {"podDisruptionBudget": {"maxUnavailable": "0%"}, "replicas": 2},
        "no node could ever be drained",
    ),
    "memory that cannot be added": (
        {"hostCache": {"sizeGB": 8}, "resources": {"limits": {"memory": "4e9"}}},
        "write it as 4Gi or 4G",
    ),
    "no budget": ({"podDisruptionBudget": {"maxUnavailable": None}}, "are both null"),
    "claim without the cache": ({"cache": {"existingClaim": "c"}}, "set cache.enabled=true"),
    "two monitors": (
        {"metrics": {"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}}},
        "would count every sample twice",
    ),
    "invalid Service name": ({"fullnameOverride": "8b"}, "set fullnameOverride"),
    "ingress without host": ({"ingress": {"enabled": True}}, "set ingress.hosts"),
    "route without gateway": ({"httpRoute": {"enabled": True}}, "set httpRoute.parentRefs"),
    "label of the chart": (
        {"podLabels": {"app.kubernetes.io/name": "x"}},
        "which the chart sets itself",
    ),
}


@pytest.mark.parametrize(("values", "sentence"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_contradiction_is_refused_with_its_remedy(render, values, sentence):
    with pytest.raises(ChartError) as refused:
        render(values)
    assert sentence in str(refused.value)


def test_every_refusal_in_the_templates_is_tested():
    """Each message of a refusal has one case, and four messages have a second case."""
    texts = [path.read_text() for path in (CHART / "templates").glob("_*.tpl")]
    assert sum(text.count("{{- fail ") for text in texts) == len(CONTRADICTIONS) - 4


@pytest.mark.parametrize(
    "values",
    [
        {"replica": 2},
        {"model": {"name": "x"}},
        {"service": {"port": "http"}},
        {"drain": {"teardownSeconds": 5}},
        {"image": {"digest": DIGEST}},
        {"strategy": {"type": "BlueGreen"}},
        {"autoscaling": {"minReplicas": 0}},
        {"cache": {"size": "lots"}},
        {"cache": {"size": "1000ki"}},
        {"extraEnv": [{"value": "nameless"}]},
        {"extraEnv": [{"name": "A", "value": 1}]},
        {"server": {"memoryRatio": "much"}},
        {"server": {"memoryRatio": ""}},
        {"server": {"kvCacheDtype": "int4"}},
        {"server": {"toolFormat": "herms"}},
        {"server": {"allowedOrigins": ["chat.example.com"]}},
        {"server": {"allowedOrigins": ["https://chat.example.com/"]}},
        {"render": {"scheduling": {"nodeName": "n"}}},
        {"server": {"maxRunningRequests": 8193}},  # the bound of the server's own flag
        {"extraArgs": [True]},
        {"auth": {"key": ""}},
        {"ingress": {"path": "v1"}},
    ],
    ids=str,
)
def test_schema_refuses(render, values):
    with pytest.raises(ChartError, match=r"schema|at '"):
        render(values)


@pytest.mark.parametrize(
    "values",
    [
        {"global": {"anything": 1}},
        {"strategy": {"maxSurge": "25%", "maxUnavailable": 0}},
        {"resources": {"requests": {"cpu": 4, "memory": "1Gi"}}},
        {"server": {"maxSeqLen": 1048576}},
        {"tmp": {"size": "1000Ki"}},
        {"server": {"toolFormat": "mistral-v11", "speculative": "ngram", "quantization": None}},
        {"server": {"allowedOrigins": ["*", "null", "http://[::1]:8080", "app://-"]}},
        {"auth": {"cacheIsolation": "key"}, "extraEnvFrom": [{"secretRef": {"name": "keys"}}]},
        {"auth": {"cacheIsolation": "key", "keysSecret": "keys"}},
        {"startup": {"budgetSeconds": 5, "periodSeconds": 5}},
        {"metrics": {"serviceMonitor": {"interval": "1m30s", "scrapeTimeout": "90s"}}},
    ],
    ids=str,
)
def test_schema_accepts(render, values):
    assert render(values)


def last_bucket(metric: str) -> float:
    """The last bucket of a histogram in the table of docs/operations.md, in seconds."""
    (buckets,) = (cells[1] for cells in rows("metric") if metric in cells[0])
    number, unit = buckets.split(", ")[-1].split()
    assert unit == "s"
    return float(number)


FRACTIONS = {
    "server.memoryRatio": (0.01, 1.0),
    "prometheusRule.errorRatio": (0.001, 1.0),
    "prometheusRule.ttftSeconds": (0.001, last_bucket("time to first token") - 0.001),
    "prometheusRule.itlSeconds": (0.001, last_bucket("inter-token latency") - 0.001),
}


@pytest.mark.parametrize("spelling", [float, str])
@pytest.mark.parametrize("path", FRACTIONS)
def test_a_fraction_may_be_a_number_or_a_string(render, path, spelling):
    """A values file gives a number and `--set` a string; the bounds are the same for both."""
    group, name = path.split(".")
    lowest, highest = FRACTIONS[path]
    for value in (lowest, highest):
        assert render({group: {name: spelling(value)}}), value
    for value in (lowest - 0.001, highest + 0.001):
        with pytest.raises(ChartError, match=f"{path} is .* set a number"):
            render({group: {name: spelling(round(value, 6))}})


def test_the_bounds_of_the_memory_ratio_are_those_of_the_server():
    for value in FRACTIONS["server.memoryRatio"]:
        assert build_parser().parse_strictly([f"--memory-ratio={value}"])
    for value in (0.009, 1.001):
        with pytest.raises(SystemExit):
            build_parser().parse_strictly([f"--memory-ratio={value}"])


@pytest.mark.parametrize("spelling", ["0.8", ".8", "8e-1", 0.8])
def test_a_fraction_reaches_the_server_and_the_alerts(render, spelling):
    values = {"server": {"memoryRatio": spelling}, "prometheusRule": {"enabled": True}}
    values["prometheusRule"]["itlSeconds"] = spelling
    objects = render(values)
    assert float(flags_of(objects)["--memory-ratio"]) == 0.8
    rules = pick(objects, "PrometheusRule")["spec"]["groups"][0]["rules"]
    (expr,) = (rule["expr"] for rule in rules if rule["alert"] == "MinisglSlowTokens")
    assert expr.endswith(f"> {spelling}")


@pytest.mark.parametrize(
    ("given", "shown"),
    [(5, "5"), ("5", "5"), (0.25, "0.25"), ("0.25", "0.25"), (2000000, "2000000")],
)
def test_a_number_in_extra_args_is_printed_plainly(render, given, shown):
    """`--set extraArgs[1]=5` passes a number."""
    container = container_of(render({"extraArgs": ["--max-choices", given]}))
    assert container["args"][-2:] == ["--max-choices", shown]


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost",
        "localhost.",
        "minisgl.localhost",
        "ip6-localhost",
        "127.0.0.1",
        "127.1",
        "127.255.0.7",
        "::1",
        "[::1]",
        "0:0:0:0:0:0:0:1",
        "::ffff:127.0.0.1",
    ],
)
def test_a_loopback_address_is_refused(render, host):
    with pytest.raises(ChartError, match=r"reachable only inside the pod.*Set 0\.0\.0\.0"):
        render({"server": {"host": host}})


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.7", "fd00::1", "::1:1", "node-localhost", "pod.example.com"]
)
def test_an_address_that_may_be_reachable_is_passed_on(render, host):
    assert flags_of(render({"server": {"host": host}}))["--host"] == host


def test_null_empties_a_list_or_map_and_nothing_else(render):
    """A value whose lines are all commented out is null, and Helm then deletes the default.

    A template can handle a missing list or map. It would print a missing number as 0 and fail for a
    missing group, so the schema refuses null there.
    """

    def check(group: dict[str, Any], *above: str) -> None:
        for name, default in group.items():
            path = [*above, name]
            values = reduce(lambda inner, key: {key: inner}, reversed(path), None)
            if default in (None, "", [], {}) or name in (*OPEN, "tolerations"):
                assert render(values), path
                continue
            with pytest.raises(ChartError, match=name):
                render(values)
            if isinstance(default, dict):
                check(default, *path)

    check(yaml.safe_load(VALUES))


def test_large_numbers_stay_plain(helm):
    values = {"server": {"maxSeqLen": 1048576, "maxQueuedRequests": 2000000}}
    text = "".join(helm.template(values, name="a", namespace="b", chart=CHART).values())
    assert "--max-seq-len-override=1048576" in text
    assert "--max-queued-requests=2000000" in text


def test_the_schema_file_is_up_to_date():
    for path, text in write_schema().items():
        assert path.read_text() == text, "run: make chart"


def test_schema_is_strict_and_accepts_the_defaults():
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    validator = jsonschema.Draft7Validator(schema)
    assert list(validator.iter_errors(yaml.safe_load(VALUES))) == []


def test_every_value_is_documented_and_used():
    assert undocumented(VALUES) == []
    assert len(VALUES.splitlines()) < 410
    templates = "".join(p.read_text() for p in (CHART / "templates").rglob("*") if p.is_file())
    groups = ("readiness.", "liveness.")  # rendered whole
    keys = [key for key in documented_keys(VALUES) if not key.startswith(groups)]
    used = {*re.findall(r'[."](\w+)', templates)}
    assert [key for key in keys if key.rsplit(".")[-1] not in used] == []
