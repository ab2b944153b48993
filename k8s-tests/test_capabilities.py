"""Features that only some clusters have. A skip names the missing feature.

The tests create their releases themselves, because module fixtures would run before a skip.
"""

import pytest
from k8s_harness.capabilities import GPU, PROBE
from k8s_harness.client import CLIENT, ClientPod
from k8s_harness.helm import find_helm
from k8s_harness.kube import Kube
from k8s_harness.objects import Object, Seen
from k8s_harness.release import NAME, Release
from k8s_harness.settings import Settings
from k8s_harness.shell import run
from k8s_harness.values import cpu, image_values
from k8s_harness.wait import wait_for
from kubernetes.utils.quantity import parse_quantity


def installed(kube: Kube, values: Object) -> Release:
    return Release(kube, find_helm(kube.access, kube.namespace, run), values).install()


@pytest.mark.networkpolicy
def test_network_policy_admits_only_the_named_peers(empty: Kube, image: str) -> None:
    peers = [{"podSelector": {"matchLabels": {"may": "come"}}}]
    values = cpu(image, networkPolicy={"enabled": True, "from": peers})
    release = installed(empty, values).wait_ready()
    ClientPod(empty, image)
    address = empty.need("Pod", release.the_pod())["status"]["podIP"]

    def is_admitted(_: Seen) -> bool:
        return empty.execute(CLIENT, "python3", "-c", PROBE, address, "1919")[0] == 0

    wait_for(empty, "Pod", lambda seen: not is_admitted(seen), "the policy", name=CLIENT)
    release.helm.test(NAME)
    empty.patch("Pod", CLIENT, {"metadata": {"labels": {"may": "come"}}})
    wait_for(empty, "Pod", is_admitted, "the connection", name=CLIENT)


@pytest.mark.metrics
def test_memory_stays_under_the_limit(empty: Kube, image: str) -> None:
    release = installed(empty, cpu(image)).wait_ready()
    pod = release.the_pod()

    def measured(_: Seen) -> Object | None:  # PodMetrics cannot be watched
        return empty.get("PodMetrics", pod)

    found = wait_for(empty, "Pod", measured, "a measurement", name=pod, timeout_s=180)
    (used,) = (parse_quantity(c["usage"]["memory"]) for c in found["containers"])
    assert 0 < used < parse_quantity(release.values["resources"]["limits"]["memory"])


@pytest.mark.loadbalancer
def test_load_balancer_gets_an_address(empty: Kube, image: str) -> None:
    def addressed(seen: Seen) -> bool:
        return bool(seen.objects[NAME]["status"].get("loadBalancer", {}).get("ingress"))

    installed(empty, cpu(image, service={"type": "LoadBalancer"})).wait_ready()
    wait_for(empty, "Service", addressed, "an address", name=NAME)


@pytest.mark.gpu
def test_default_values_serve_on_a_gpu(empty: Kube, settings: Settings) -> None:
    assert settings.gpu_image is not None
    release = installed(empty, image_values(settings.gpu_image)).wait_ready()
    (container,) = release.deployment["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"][GPU] == "1"
    release.helm.test(NAME)
