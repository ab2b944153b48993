"""What the chart refuses, and in which words."""

import json
from functools import reduce
from typing import Any

import jsonschema
import pytest
import yaml

from tests.chart.helm import CHART, ChartError
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
        "set cache.enabled with a filled cache.existingClaim",
    ),
    "download behind a wall": (
        {"model": {"id": "a/b"}, "networkPolicy": {"enabled": True, "allowHTTPS": False}},
        "set networkPolicy.extraEgress to a mirror",
    ),
    "two hub tokens": ({"huggingface": {"token": "t", "existingSecret": "s"}}, "remove token"),
    "two API keys": ({"auth": {"apiKey": "k", "existingSecret": "s"}}, "remove apiKey"),
    "too few GPUs": (
        {"tensorParallelSize": 4, "gpu": {"count": 2}},
        "gpu.count is 2, but tensorParallelSize is 4",
    ),
    "GPUs among the limits": (
        {"resources": {"limits": {"nvidia.com/gpu": 2}}},
        "which tensorParallelSize gives: remove it there",
    ),
    "GPUs among the requests": (
        {"resources": {"requests": {"nvidia.com/gpu": 2}}},
        "which tensorParallelSize gives: remove it there",
    ),
    "no GPU at all": ({"gpu": {"resourceName": ""}}, "set one of the two, or gpu.enabled=false"),
    "flag of the chart": ({"extraArgs": ["--tp=4"]}, "set tensorParallelSize instead"),
    "port by flag": ({"extraArgs": ["--port", "80"]}, "set service.port instead"),
    "short grace period": (
        {"terminationGracePeriodSeconds": 30},
        "is 30, but preStop, drain and teardown take up to 90",
    ),
    "grace over drain": (
        {"drain": {"graceSeconds": 60, "timeoutSeconds": 60}},
        "raise timeoutSeconds",
    ),
    "rollout without room": (
        {"strategy": {"maxSurge": 0, "maxUnavailable": "0%"}},
        "a rollout could never move",
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
    "two autoscalers": (BOTH_SCALERS, "two autoscalers would fight"),
    "KEDA without Prometheus": (
        {"autoscaling": {"keda": {"enabled": True}}},
        "set autoscaling.keda.prometheusAddress",
    ),
    "least over most": ({"autoscaling": {"minReplicas": 9}}, "lower it or raise maxReplicas"),
    "two budgets": (
        {"podDisruptionBudget": {"minAvailable": 1}},
        "set the other to null",
    ),
    "no pod may go": (
        {"podDisruptionBudget": {"minAvailable": 2, "maxUnavailable": None}, "replicas": 2},
        "no node could ever be drained",
    ),
    "no pod of three may go": (
        {"podDisruptionBudget": {"minAvailable": "67%", "maxUnavailable": None}, "replicas": 3},
        "no node could ever be drained",
    ),
    "no pod may be away": (
        {"podDisruptionBudget": {"maxUnavailable": "0%"}, "replicas": 2},
        "no node could ever be drained",
    ),
    "no budget": ({"podDisruptionBudget": {"maxUnavailable": None}}, "are both null"),
    "claim without the cache": ({"cache": {"existingClaim": "c"}}, "set cache.enabled=true"),
    "two monitors": (
        {"metrics": {"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}}},
        "every sample would count twice",
    ),
    "name of no Service": ({"fullnameOverride": "8b"}, "set fullnameOverride"),
    "ingress without host": ({"ingress": {"enabled": True}}, "set ingress.hosts"),
    "route without gateway": ({"httpRoute": {"enabled": True}}, "set httpRoute.parentRefs"),
    "label of the chart": (
        {"podLabels": {"app.kubernetes.io/name": "x"}},
        "which is the chart's own",
    ),
}


@pytest.mark.parametrize(("values", "sentence"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_contradiction_is_refused_with_its_remedy(render, values, sentence):
    with pytest.raises(ChartError) as refused:
        render(values)
    assert sentence in str(refused.value)


def test_every_refusal_in_the_templates_is_tested():
    """A sentence without a case here is a gap; four of them have two cases."""
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
        {"server": {"memoryRatio": 1.5}},
        {"server": {"maxRunningRequests": 8193}},  # as the server itself
        {"prometheusRule": {"ttftSeconds": 160}},  # the last bucket: the alert could never fire
        {"prometheusRule": {"itlSeconds": 10}},
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
    ],
    ids=str,
)
def test_schema_accepts(render, values):
    assert render(values)


def test_null_empties_a_list_or_map_and_nothing_else(render):
    """`resources:` with every line below it commented out is null. Of what Helm then takes away,
    lists and maps may be missing; a missing number would be printed as 0, a group as an error."""

    def look(group: dict[str, Any], *above: str) -> None:
        for name, default in group.items():
            path = [*above, name]
            values = reduce(lambda inner, key: {key: inner}, reversed(path), None)
            if default in (None, "", [], {}) or name in (*OPEN, "tolerations"):
                assert render(values), path
                continue
            with pytest.raises(ChartError, match=name):
                render(values)
            if isinstance(default, dict):
                look(default, *path)

    look(yaml.safe_load(VALUES))


def test_large_numbers_stay_plain(helm):
    values = {"server": {"maxSeqLen": 1048576, "maxQueuedRequests": 2000000}}
    text = "".join(helm.template(values, name="a", namespace="b", chart=CHART).values())
    assert "--max-seq-len-override=1048576" in text
    assert "--max-queued-requests=2000000" in text


def test_schema_is_as_generated():
    for path, text in write_schema().items():
        assert path.read_text() == text, "run: make chart"


def test_schema_is_strict_and_accepts_the_defaults():
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    validator = jsonschema.Draft7Validator(schema)
    assert list(validator.iter_errors(yaml.safe_load(VALUES))) == []


def test_every_value_is_documented_and_used():
    assert undocumented(VALUES) == []
    assert len(VALUES.splitlines()) < 400
    templates = "".join(p.read_text() for p in (CHART / "templates").rglob("*") if p.is_file())
    groups = ("readiness.", "liveness.")  # rendered whole
    keys = [key for key in documented_keys(VALUES) if not key.startswith(groups)]
    assert [key for key in keys if f".{key.rsplit('.')[-1]}" not in templates] == []
