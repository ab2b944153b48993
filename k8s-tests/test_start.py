"""The first start: live at once, and ready only when the model is loaded."""

import pytest
from k8s_harness.kube import Kube
from k8s_harness.objects import Seen
from k8s_harness.release import NAME, Release, ready_endpoints
from k8s_harness.status import restarts
from k8s_harness.values import CI_FILES, HELD_UNTIL, ci_values, held, image_values, merged
from k8s_harness.wait import wait_for

CPU_DEMO = next(path for path in CI_FILES if path.name == "cpu-demo-values.yaml")


@pytest.fixture(scope="module")
def release(install, image) -> Release:
    """The CPU values that the README installs, with the image under test. The start is held."""
    return install(merged(ci_values(CPU_DEMO), image_values(image), held()))


def test_not_ready_until_loaded_and_live_meanwhile(release: Release, namespace: Kube) -> None:
    """The start is held, so the server loads for as long as the test looks at it."""

    def is_live(seen: Seen) -> str:
        names = [name for name in seen.objects if namespace.probe(name, "/livez")[0] == 200]
        return names[0] if names else ""

    pods = release.selector
    name = wait_for(namespace, "Pod", is_live, "a live pod", selector=pods, pods=pods)
    assert namespace.probe(name, "/readyz")[0] == 503
    assert release.ready_pods() == []
    assert ready_endpoints(namespace.all("EndpointSlice")) == []
    assert namespace.execute(name, "touch", HELD_UNTIL)[0] == 0
    release.wait_ready()
    assert [namespace.probe(name, path)[0] for path in ("/livez", "/readyz")] == [200, 200]
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
