"""Each file of helm/ci installs and passes `helm test` on a cluster that has the APIs it needs."""

from pathlib import Path

import pytest
from k8s_harness.helm import CHART, Helm, find_helm
from k8s_harness.kube import Kube
from k8s_harness.needs import missing
from k8s_harness.objects import Object
from k8s_harness.release import NAME, Release
from k8s_harness.shell import run
from k8s_harness.values import CI_FILES, ci_values, demo_on_cpu, key_secret, merged
from k8s_harness.wait import Broken

from tests.chart.helm import find_helm as find_renderer
from tests.chart.helm import parse


def rendered(values: Object, kube: Kube) -> list[Object]:
    renderer = find_renderer()
    assert renderer is not None
    return parse(renderer.template(values, name=NAME, namespace=kube.namespace, chart=CHART))


@pytest.mark.parametrize("path", CI_FILES, ids=lambda path: path.name.removesuffix("-values.yaml"))
def test_a_values_file_installs_and_passes_helm_test(path: Path, empty: Kube, image: str) -> None:
    """Replaces image, model, GPUs and sizes in the file, and creates the Secret of its keys. Skips
    if the cluster lacks an API, a class, a Secret or a node label that the file needs.
    """
    values = merged(ci_values(path), demo_on_cpu(image))
    objects = rendered(values, empty)
    if secret := key_secret(values):
        empty.create(secret)
    if lacks := missing(empty, objects):
        pytest.skip("; ".join(lacks))
    release = Release(empty, find_helm(empty.access, empty.namespace, run), values).install()
    release.wait_ready().helm.test(NAME)
    for one in objects:
        is_hook = "helm.sh/hook" in one["metadata"].get("annotations", {})
        assert is_hook or empty.get(one["kind"], one["metadata"]["name"]), one["metadata"]


def test_default_values_ask_for_a_gpu(empty: Kube, image: str) -> None:
    """Without a GPU the pod stays pending, and the wait ends with the reason, not by timeout."""
    if any("nvidia.com/gpu" in n["status"].get("allocatable", {}) for n in empty.all("Node")):
        pytest.skip("a node offers GPUs")
    helm: Helm = find_helm(empty.access, empty.namespace, run)
    release = Release(empty, helm, {}).install()
    with pytest.raises(Broken, match=r"Unschedulable: .*Insufficient nvidia\.com/gpu"):
        release.wait_ready()
