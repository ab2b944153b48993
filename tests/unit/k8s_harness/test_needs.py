"""The check of a cluster before a values file is installed."""

from pathlib import Path
from typing import Any

import pytest
from k8s_harness.needs import missing
from k8s_harness.values import CI_FILES, ci_values, demo_on_cpu, key_secret, merged

from tests.chart.helm import CHART, find_helm, parse
from tests.unit.k8s_harness.replies import DISCOVERY, group, listing, replayed

SECURED = next(path for path in CI_FILES if path.name == "secured-values.yaml")
NODES, SECRETS = "/api/v1/nodes", "/api/v1/namespaces/default/secrets"


def cluster_wide(*parts: tuple[str | None, str, dict[str, str]]) -> list[dict[str, Any]]:
    groups = [group(name, version, **plurals) for name, version, plurals in parts]
    for one in groups:
        for resource in one["versions"][0]["resources"]:
            resource["scope"] = "Cluster"
    return groups


CLASSES = cluster_wide(
    ("storage.k8s.io", "v1", {"StorageClass": "storageclasses"}),
    ("scheduling.k8s.io", "v1", {"PriorityClass": "priorityclasses"}),
    ("node.k8s.io", "v1", {"RuntimeClass": "runtimeclasses"}),
)
BARE: dict[str, Any] = {
    "GET /api": {
        "items": [*DISCOVERY["/api"]["items"], *cluster_wide((None, "v1", {"Node": "nodes"}))]
    },
    "GET /apis": {"items": [*DISCOVERY["/apis"]["items"], *CLASSES]},
    f"GET {NODES}": listing({"metadata": {"name": "n", "labels": {"disk": "ssd"}}}),
    "GET /apis/storage.k8s.io/v1/storageclasses": listing(),
}


def deployment(**pod: Any) -> dict[str, Any]:
    given = {"containers": [{"env": []}], "volumes": [], **pod}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "d"},
        "spec": {"template": {"spec": given}},
    }


def test_every_deployment_is_checked(tmp_path: Path) -> None:
    """With render.enabled a release has two Deployments, which once ended the check by an error."""
    objects = [
        deployment(nodeSelector={"disk": "ssd"}, priorityClassName="serving"),
        deployment(nodeSelector={"gpu": "H200"}, runtimeClassName="nvidia"),
    ]
    with replayed(tmp_path, BARE) as (kube, _):
        assert missing(kube, objects) == [
            "no PriorityClass serving",
            "no RuntimeClass nvidia",
            "no node with {'gpu': 'H200'}",
        ]


def test_a_secret_of_a_volume_or_a_variable_is_checked(tmp_path: Path) -> None:
    key = {"valueFrom": {"secretKeyRef": {"name": "variable", "key": "k"}}}
    pod = deployment(
        volumes=[{"name": "keys", "secret": {"secretName": "volume"}}],
        containers=[{"env": [{"name": "A", **key}, {"name": "B", "value": "b"}]}],
    )
    made = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "variable"}}
    with replayed(tmp_path, BARE) as (kube, _):
        assert missing(kube, [pod]) == ["no Secret variable", "no Secret volume"]
        assert missing(kube, [pod, made]) == ["no Secret volume"]
    existing = {f"GET {SECRETS}/volume": {"metadata": {"name": "volume"}}}
    with replayed(tmp_path, BARE | existing) as (kube, _):
        assert missing(kube, [pod, made]) == []


def test_the_secured_values_lack_no_secret_once_their_keys_are_created(tmp_path: Path) -> None:
    helm = find_helm()
    if helm is None:
        pytest.skip("no helm on PATH and no helm-python-sdk: pip install '.[chart]'")
    values = merged(ci_values(SECURED), demo_on_cpu("minisgl:1"))
    objects = parse(helm.template(values, name="minisgl", namespace="ns", chart=CHART))
    secret = key_secret(values)
    assert secret is not None
    name = secret["metadata"]["name"]
    with replayed(tmp_path, BARE) as (kube, _):
        assert f"no Secret {name}" in missing(kube, objects)
    with replayed(tmp_path, BARE | {f"GET {SECRETS}/{name}": secret}) as (kube, _):
        assert not [lack for lack in missing(kube, objects) if "Secret" in lack]
    assert key_secret({"auth": {"keysSecret": ""}}) is key_secret({}) is None
