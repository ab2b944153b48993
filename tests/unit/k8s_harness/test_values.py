"""Changes of the values files for a CPU cluster."""

from pathlib import Path

import pytest
from k8s_harness.values import CI_FILES, ci_values, cpu, demo_on_cpu, merged

from tests.chart.helm import CHART, find_helm, parse

IMAGE = "host:5000/minisgl:1"


def test_maps_are_merged_and_the_rest_is_replaced() -> None:
    base = {"a": {"b": 1, "c": [1]}, "d": {"e": 1}, "f": 1}
    changed = merged(base, {"a": {"c": [2]}, "d": {}}, {"f": {"g": 1}})
    assert changed == {"a": {"b": 1, "c": [2]}, "d": {}, "f": {"g": 1}}
    assert base == {"a": {"b": 1, "c": [1]}, "d": {"e": 1}, "f": 1}


@pytest.mark.parametrize("path", CI_FILES, ids=lambda path: path.stem)
def test_every_file_renders_a_pod_for_cpus(path: Path) -> None:
    helm = find_helm()
    if helm is None:
        pytest.skip("no helm on PATH and no helm-python-sdk: pip install '.[chart]'")
    values = merged(ci_values(path), demo_on_cpu(IMAGE))
    objects = parse(helm.template(values, name="minisgl", namespace="ns", chart=CHART))
    deployments = [one for one in objects if one["kind"] == "Deployment"]
    assert deployments
    for deployment in deployments:
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert container["image"] == IMAGE
        assert "--device=cpu" in container["args"]
        assert not any(arg.startswith("--model=") for arg in container["args"])
        assert container["resources"]["requests"]["cpu"] == "100m"
        assert "nvidia.com/gpu" not in container["resources"]["limits"]


def test_changes_of_a_test_take_precedence() -> None:
    values = cpu(IMAGE, replicas=2, drain={"graceSeconds": 1})
    assert values["replicas"] == 2
    assert values["drain"] == {"timeoutSeconds": 90, "graceSeconds": 1}
    assert values["image"]["tag"] == "1"
