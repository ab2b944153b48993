"""Each values file in helm/ci lints, renders, and gives valid Kubernetes objects."""

from functools import cache
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import referencing
import yaml
from kubernetes_validate.utils import schema_contents

from tests.chart import crds
from tests.chart.conftest import CI_FILES
from tests.chart.helm import CHART, Object

VERSIONS = [v for v in kubernetes_validate.utils.all_versions() if v.split(".") >= ["1", "30"]]


@cache
def _registry(version: str) -> referencing.Registry:
    definitions = schema_contents(_folder(version) + "_definitions.json", version)
    return referencing.Resource.from_contents(definitions) @ referencing.Registry()


@cache
def _validator(version: str, kind: str, api: str) -> Any:
    """A strict validator, as in kubernetes_validate, but each schema is read only once."""
    group, _, number = api.rpartition("/")
    name = "-".join(part for part in (kind.lower(), group.split(".")[0], number) if part)
    schema = schema_contents(f"{_folder(version)}{name}.json", version)
    return jsonschema.Draft202012Validator(schema, registry=_registry(version))


def _folder(version: str) -> str:
    return f"kubernetes-json-schema/v{version}-local-strict/"


def complaints(objects: list[Object], version: str) -> list[str]:
    """The errors in the objects by the schemas of that Kubernetes version."""
    found = []
    for one in objects:
        custom = crds.SCHEMAS.get((one["apiVersion"], one["kind"]))
        validator = (
            jsonschema.Draft202012Validator(custom)
            if custom
            else _validator(version, one["kind"], one["apiVersion"])
        )
        found += [
            f"{one['kind']}/{one['metadata']['name']} {'.'.join(map(str, error.path))}: "
            f"{error.message[:300]}"
            for error in validator.iter_errors(one)
        ]
    return found


def test_the_documented_ci_files_exist():
    names = {"default", "cpu-demo", "tp4-pvc", "secured", "autoscaled", "inference-gateway"}
    names |= {"routed"}
    assert {path.name.removesuffix("-values.yaml") for path in CI_FILES} == names


def test_lint_is_silent(helm, ci_values):
    assert helm.lint(ci_values) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_are_valid(render, ci_values, version):
    assert complaints(render(ci_values), version) == []


def test_validation_covers_old_and_new_versions():
    assert VERSIONS[0] == "1.30.0"
    assert len(VERSIONS) >= 8


def test_validation_finds_a_wrong_field(render):
    objects = render()
    objects[0]["spec" if "spec" in objects[0] else "data"] = 1
    assert complaints(objects, "1.30.0")


@pytest.mark.parametrize(
    "values",
    [
        {"model": {"hostPath": "/srv/models", "path": "qwen"}},
        {"autoscaling": {"hpa": {"enabled": True}}},
        {"drain": {"preStopSleepSeconds": 10}},
        {"podDisruptionBudget": {"minAvailable": "50%", "maxUnavailable": None}, "replicas": 3},
        {"strategy": {"type": "Recreate"}},
        {"service": {"type": "LoadBalancer", "port": 80, "headless": True}},
        {
            "kvEvents": {"enabled": True},
            "render": {"enabled": True},
            "networkPolicy": {"enabled": True},
        },
        {"networkPolicy": {"enabled": True, "allowHTTPS": False, "extraEgress": [{}]}},
        {
            "gpu": {"resourceName": ""},
            "resourceClaims": [{"name": "gpu", "resourceClaimName": "g"}],
        },
        {"extraEnv": [{"name": "A", "value": "b"}], "extraEnvFrom": [{"secretRef": {"name": "s"}}]},
        {
            "initContainers": [{"name": "i", "image": "i"}],
            "extraContainers": [{"name": "c", "image": "c"}],
            "extraVolumes": [{"name": "v", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "v", "mountPath": "/v"}],
        },
        {"metrics": {"serviceMonitor": {"enabled": True}}, "prometheusRule": {"enabled": True}},
    ],
    ids=lambda values: "-".join(values),
)
def test_further_values_give_valid_objects(render, values):
    assert complaints(render(values), "1.37.0") == []


def test_names_that_look_like_numbers_stay_strings(render):
    """A namespace or Secret 2024 was once rendered as a number, which the cluster refused."""
    name = "2024"
    source = {"existingSecret": name, "key": name}
    values = {
        "fullnameOverride": "a",
        "auth": {**source, "adminSecret": name, "adminSecretKey": name},
        "autoscaling": {
            "keda": {"enabled": True, "prometheusAddress": "http://p", "authentication": name}
        },
        "cache": {"enabled": True, "accessModes": ["ReadWriteMany"], "storageClass": name},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": name}]},
        "huggingface": source,
        "inferencePool": {"enabled": True, "endpointPicker": {"name": name}},
        "ingress": {"enabled": True, "hosts": [name], "className": name},
        "model": {"existingClaim": name},
        "priorityClassName": name,
        "runtimeClassName": name,
        "schedulerName": name,
        "serviceAccount": {"name": name},
    }
    assert complaints(render(values, name=name, namespace=name), "1.37.0") == []
    made = {"apiKey": "k", "key": name}
    kept = {"enabled": True, "existingClaim": name}
    others = {"fullnameOverride": "a", "auth": made, "cache": kept}
    assert complaints(render(others, name=name, namespace=name), "1.37.0") == []


def test_image_volume_is_valid_from_kubernetes_1_33_on(render):
    objects = render({"model": {"image": "ghcr.io/example/qwen3-8b:1", "path": "model"}})
    assert complaints(objects, "1.33.0") == []


def test_templates_hold_one_object_and_stay_short(helm):
    for path in (CHART / "templates").rglob("*"):
        if path.is_file():
            assert len(path.read_text().splitlines()) < 120, path.name
    for values in CI_FILES:
        given = yaml.safe_load(values.read_text()) or {}
        texts = helm.template(given, name="minisgl", namespace="llm", chart=CHART)
        for path, text in texts.items():
            if not path.endswith("NOTES.txt"):
                assert len([d for d in yaml.safe_load_all(text) if d]) <= 1, path


def test_extra_objects_are_templates(render):
    extra = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-x"}}
    names = [o["metadata"]["name"] for o in render({"extraObjects": [extra]}, name="chat")]
    assert "chat-x" in names


def test_every_object_is_named_after_the_release(render, ci_values):
    for name, prefix in (
        ("minisgl", "minisgl"),
        ("chat", "chat-minisgl"),
        ("my-minisgl", "my-min"),
    ):
        for one in render(ci_values, name=name):
            assert one["metadata"]["name"].startswith(prefix)
            assert one["metadata"]["namespace"] == "llm"
