"""Values for the chart: the files of helm/ci with the changes that a CPU cluster needs."""

from pathlib import Path
from typing import Any

import yaml

from k8s_harness.helm import CHART
from k8s_harness.objects import Object

__all__ = [
    "CI_FILES",
    "HELD_UNTIL",
    "ci_values",
    "cpu",
    "demo_on_cpu",
    "held",
    "image_values",
    "key_secret",
    "merged",
]

HOLD = Path(__file__).parent / "incluster" / "hold.py"
HELD_UNTIL = "/tmp/go"  # the file that ends the wait of hold.py

CI_FILES = sorted((CHART / "ci").glob("*-values.yaml"))


def merged(base: Object, *changes: Object) -> Object:
    """Merges maps and replaces all other values. An empty map replaces the map below it."""
    result = dict(base)
    for change in changes:
        for key, value in change.items():
            below = result.get(key)
            both = isinstance(below, dict) and isinstance(value, dict) and value
            result[key] = merged(below or {}, value) if both else value
    return result


def ci_values(path: Path) -> Object:
    return yaml.safe_load(path.read_text()) or {}


def image_values(image: str) -> Object:
    repository, _, tag = image.rpartition(":")
    return {"image": {"repository": repository, "tag": tag, "digest": ""}}


def demo_on_cpu(image: str) -> Object:
    """Changes that let the CPU image run with a values file that sets GPUs and a model of the
    hub.
    """
    resources = {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "4Gi"}}
    return {
        **image_values(image),
        "gpu": {"enabled": False},
        "model": {"id": "", "revision": "", "existingClaim": "", "path": ""},
        "resources": resources,
        "render": {"resources": resources},
        "extraEnv": [{"name": "OMP_NUM_THREADS", "value": "1"}],
    }


def key_secret(values: Object) -> Object | None:
    """The Secret that auth.keysSecret names, with one key; None if the values name none."""
    name = values.get("auth", {}).get("keysSecret")
    if not name:
        return None
    kind: Object = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}}
    return kind | {"stringData": {"keys": "tests: not-a-real-key"}}


def held() -> Object:
    """Values with which the scheduler waits at its start until the file HELD_UNTIL exists."""
    name = "held"
    code: Object = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}}
    variables = {"PYTHONPATH": "/held", "HELD_UNTIL": HELD_UNTIL}
    return {
        "extraObjects": [code | {"data": {"sitecustomize.py": HOLD.read_text()}}],
        "extraVolumes": [{"name": name, "configMap": {"name": name}}],
        "extraVolumeMounts": [{"name": name, "mountPath": "/held", "readOnly": True}],
        "extraEnv": [{"name": key, "value": value} for key, value in variables.items()],
    }


def cpu(image: str, **changes: Any) -> Object:
    """helm/ci/cpu-demo-values.yaml with small requests, so that several pods fit on a laptop."""
    demo = ci_values(CHART / "ci" / "cpu-demo-values.yaml")
    small = demo_on_cpu(image)
    small["server"] = {"maxRunningRequests": 32}
    small["drain"] = {"timeoutSeconds": 90}
    return merged(demo, small, changes)
