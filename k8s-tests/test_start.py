"""From nothing to ready: alive at once, ready when the model is loaded, and not a moment before."""

import time

import pytest
from k8s_harness.kube import Kube
from k8s_harness.release import NAME, READY_S, Release, ready_endpoints
from k8s_harness.status import is_ready, restarts
from k8s_harness.values import CI_FILES, ci_values, image_values, merged
from k8s_harness.wait import require_hope

CPU_DEMO = next(path for path in CI_FILES if path.name == "cpu-demo-values.yaml")


@pytest.fixture(scope="module")
def release(install, image) -> Release:
    """The defaults for CPUs, as the README installs them, but for the image under test."""
    return install(merged(ci_values(CPU_DEMO), image_values(image)))


def test_not_ready_until_loaded_and_live_meanwhile(release: Release, namespace: Kube) -> None:
    """Asked directly, from its first answer on, and compared with what Kubernetes says."""
    probes: list[tuple[int, int]] = []
    end_s = time.monotonic() + READY_S
    while time.monotonic() < end_s:
        require_hope(namespace, release.selector)
        pods = release.pods()
        if not pods or not pods[0].get("status", {}).get("podIP"):
            continue
        name = pods[0]["metadata"]["name"]
        is_up = is_ready(pods[0])
        served = ready_endpoints(namespace.all("EndpointSlice"))
        # In this order: once the one has answered, the other has to.
        ready, live = namespace.probe(name, "/readyz")[0], namespace.probe(name, "/livez")[0]
        if live or ready:
            probes.append((live, ready))
        if is_up or served:
            assert ready == 200, "Kubernetes called it ready before it was"
        if is_up and served:
            break
    assert probes[-1] == (200, 200)
    loading = [live for live, ready in probes if ready == 503]
    assert loading, f"nobody saw it loading: {probes}"
    assert set(loading) == {200}, "it was not live while it loaded"
    assert restarts(release.pods()[0]) == 0


def test_the_rollout_ends_and_the_service_leads_to_the_pod(release: Release) -> None:
    release.wait_ready()
    assert release.wait_endpoints(bool) == [release.the_pod()]


def test_start_phases_are_in_the_metrics(release: Release, namespace: Kube) -> None:
    status, text = namespace.probe(release.the_pod(), "/metrics")
    assert status == 200
    total = 'minisgl_startup_seconds{phase="total"}'
    (line,) = (line for line in text.splitlines() if line.startswith(total))
    assert float(line.split()[-1]) > 0


def test_helm_test(release: Release) -> None:
    release.helm.test(NAME)
