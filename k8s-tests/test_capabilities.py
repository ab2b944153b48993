"""What only some clusters can do; the skips say what is missing."""

import pytest
from k8s_harness.capabilities import GPU, PROBE
from k8s_harness.client import ClientPod
from k8s_harness.helm import Helm
from k8s_harness.kube import Kube
from k8s_harness.objects import Object, Seen
from k8s_harness.release import NAME, Release
from k8s_harness.values import cpu, image_values, merged
from k8s_harness.wait import wait_for


@pytest.fixture(scope="module")
def release(install, image) -> Release:
    """Only pods with the label may come in."""
    peers = [{"podSelector": {"matchLabels": {"may": "come"}}}]
    return install(cpu(image, networkPolicy={"enabled": True, "from": peers})).wait_ready()


@pytest.mark.networkpolicy
def test_network_policy_lets_in_whom_it_names(
    release: Release, client: ClientPod, namespace: Kube
) -> None:
    address = namespace.need("Pod", release.the_pod())["status"]["podIP"]
    call = ("python3", "-c", PROBE, address, "1919")

    def refused(_: Seen) -> bool:
        return namespace.execute("client", *call)[0] != 0

    def let_in(_: Seen) -> bool:
        return namespace.execute("client", *call)[0] == 0

    wait_for(namespace, "Pod", refused, "the policy", name="client")
    release.helm.test(NAME)
    namespace.patch("Pod", "client", {"metadata": {"labels": {"may": "come"}}})
    wait_for(namespace, "Pod", let_in, "the way in", name="client")


@pytest.mark.metrics
def test_memory_stays_under_the_limit(release: Release, namespace: Kube) -> None:
    pod = release.the_pod()

    def measured(seen: Seen) -> Object:
        return seen.objects.get(pod, {})

    found = wait_for(namespace, "PodMetrics", measured, "a measurement", timeout_s=180)
    assert found["containers"][0]["usage"]["memory"]


@pytest.mark.loadbalancer
def test_load_balancer_gets_an_address(release: Release, namespace: Kube) -> None:
    values = merged(release.values, {"service": {"type": "LoadBalancer"}})

    def addressed(seen: Seen) -> bool:
        return bool(seen.objects[NAME]["status"].get("loadBalancer", {}).get("ingress"))

    release.upgrade(values)
    wait_for(namespace, "Service", addressed, "an address", name=NAME)


@pytest.mark.gpu
def test_default_values_serve_on_a_gpu(helm: Helm, settings, spaces, cluster) -> None:
    from k8s_harness.helm import find_helm
    from k8s_harness.shell import run

    with spaces.open(cluster[0], "gpu") as kube:
        helm = find_helm(kube.access, kube.namespace, run)
        release = Release(kube, helm, image_values(settings.gpu_image)).install().wait_ready()
        (container,) = release.deployment["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["limits"][GPU] == "1"
        release.helm.test(NAME)
