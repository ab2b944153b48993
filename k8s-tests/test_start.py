"""The first start: live at once, and ready only when the model is loaded."""

import time

import pytest
from k8s_harness.kube import Kube
from k8s_harness.release import NAME, READY_S, Release, ready_endpoints
from k8s_harness.status import is_ready, restarts
from k8s_harness.values import CI_FILES, ci_values, image_values, merged
from k8s_harness.wait import require_startable

CPU_DEMO = next(path for path in CI_FILES if path.name == "cpu-demo-values.yaml")


@pytest.fixture(scope="module")
def release(install, image) -> Release:
    """The CPU values that the README installs, with the image under test."""
    return install(merged(ci_values(CPU_DEMO), image_values(image)))


def test_not_ready_until_loaded_and_live_meanwhile(release: Release, namespace: Kube) -> None:
    """Compares the answers of the pod with the state that Kubernetes reports."""
    probes: list[tuple[int, int]] = []
    end_s = time.monotonic() + READY_S
    while time.monotonic() < end_s:
        require_startable(namespace, release.selector)
        pods = release.pods()
        if not pods or not pods[0].get("status", {}).get("podIP"):
            continue
        name = pods[0]["metadata"]["name"]
        is_up = is_ready(pods[0])
        served = ready_endpoints(namespace.all("EndpointSlice"))
        # In this order: if /readyz answers, /livez must answer too.
        ready, live = namespace.probe(name, "/readyz")[0], namespace.probe(name, "/livez")[0]
        if live or ready:
            probes.append((live, ready))
        if is_up or served:
            assert ready == 200, "Kubernetes reported the pod ready before the server was"
        if is_up and served:
            break
    assert probes[-1] == (200, 200)
    loading = [live for live, ready in probes if ready == 503]
    assert loading, f"no probe saw the server loading: {probes}"
    assert set(loading) == {200}, "the server was not live while it loaded"
    assert restarts(release.pods()[0]) == 0


def test_the_rollout_ends_and_the_service_has_the_pod(release: Release) -> None:
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
