"""Restarts, upgrades, scaling, evictions and rollbacks of two pods under load lose no stream.

The strategy is the chart's default, which replaces one pod after the other without a spare pod.
"""

import time
from collections.abc import Callable

import pytest
from k8s_harness.client import ClientPod, require_whole
from k8s_harness.helm import HelmFailed
from k8s_harness.kube import Kube
from k8s_harness.objects import Object, Seen
from k8s_harness.release import NAME, Release
from k8s_harness.status import exit_of, has_run, leaving
from k8s_harness.values import cpu, merged
from k8s_harness.wait import recorded, wait_for
from prometheus_client.parser import text_string_to_metric_families

LOAD = [40 + 5 * n for n in range(8)]  # tokens per stream; every second stream keeps its connection


@pytest.fixture(scope="module")
def release(install, image) -> Release:
    return install(cpu(image, replicas=2)).wait_ready()


@pytest.fixture
def under_load(
    release: Release, client: ClientPod, namespace: Kube
) -> Callable[[Callable[[], object]], dict[str, Object]]:
    """under_load(disturb) calls `disturb` while streams run. Requires that no stream is cut.

    Returns the last states of the deleted pods that had run. Each of them must have ended with
    code 0 within its grace period.
    """

    def during(disturb: Callable[[], object]) -> dict[str, Object]:
        with recorded(namespace, "Pod", release.selector) as recorder:
            with client.load(release.url, LOAD, repeat=True) as load:
                load.wait_more(2 * len(LOAD))
                disturb()
                load.wait_more(2 * len(LOAD))
                ended = load.stop()
            print(f"{len(ended)} streams")
            require_whole(ended)
            seen = recorder.wait(lambda seen: not leaving(seen.objects), "the end of the old pods")
        left = {name: pod for name, pod in seen.gone.items() if has_run(pod)}
        for name, pod in left.items():
            end = exit_of(pod, NAME)
            assert end is not None, f"the watch did not see the end of {name}"
            print(f"{name}: exit code {end.code}, {end.left_s:.0f} s before its grace period ended")
            assert end.code == 0
            assert end.left_s >= 0
        return left

    return during


def answered(release: Release, pod: str) -> float:
    """Number of requests that a pod has answered with all their tokens."""
    time.sleep(0.1)  # a scrape may be this old
    status, text = release.kube.probe(pod, "/metrics")
    assert status == 200
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "minisgl_requests_total" and sample.labels["outcome"] == "length"
    )


def test_two_replicas_share_the_load(release: Release, client: ClientPod) -> None:
    pods = release.ready_pods()
    before = {pod: answered(release, pod) for pod in pods}
    with client.load(release.url, [8] * 32) as load:
        require_whole(load.stop(), 32)
    shares = {pod: answered(release, pod) - before[pod] for pod in pods}
    assert len(shares) == 2
    assert sum(shares.values()) == 32
    assert min(shares.values()) > 0, shares


def test_rolling_restart(release: Release, under_load) -> None:
    def restart() -> None:
        release.restart()
        release.wait_ready()

    assert len(under_load(restart)) == 2


def test_helm_upgrade(release: Release, under_load) -> None:
    def upgrade() -> None:
        values = merged(release.values, {"server": {"maxRunningRequests": 24}})
        release.upgrade(values).wait_ready()

    assert len(under_load(upgrade)) == 2
    (container,) = release.deployment["spec"]["template"]["spec"]["containers"]
    assert "--max-running-requests=24" in container["args"]


def test_scale_out_and_in(release: Release, under_load) -> None:
    def scale() -> None:
        for replicas in (3, 1, 2):
            release.scale(replicas)
            release.wait_ready()

    assert len(under_load(scale)) == 2


def test_disruption_budget_blocks_the_second_eviction(
    release: Release, namespace: Kube, under_load
) -> None:
    def known(seen: Seen) -> bool:
        return seen.objects[NAME].get("status", {}).get("disruptionsAllowed") == 1

    def evict() -> None:
        first, second = release.ready_pods()
        wait_for(namespace, "PodDisruptionBudget", known, "the budget", name=NAME)
        assert namespace.evict(first) == 201
        assert namespace.evict(second) == 429
        release.wait_ready()

    assert len(under_load(evict)) == 1


def test_bad_upgrade_is_rolled_back(release: Release, under_load) -> None:
    """With an image that does not exist, the pods continue to serve and Helm rolls back.

    The upgrade has a spare pod, because Helm 3 waits only for replicas - maxUnavailable pods.
    """

    def upgrade() -> None:
        spare = {"strategy": {"maxSurge": 1, "maxUnavailable": 0}}
        bad = merged(release.values, spare, {"image": {"tag": "no-such-tag"}})
        with pytest.raises(HelmFailed):
            release.helm.upgrade(NAME, bad, atomic_s=45)
        release.wait_ready()

    assert under_load(upgrade) == {}
    statuses = [revision["status"] for revision in release.helm.history(NAME)]
    assert statuses[-2:] == ["failed", "deployed"]
    (container,) = release.deployment["spec"]["template"]["spec"]["containers"]
    assert not container["image"].endswith("no-such-tag")


def test_bad_flag_is_in_the_message_and_a_manual_rollback_helps(
    release: Release, client: ClientPod
) -> None:
    """`helm rollback` repairs an upgrade without --atomic."""
    bad = merged(release.values, {"extraArgs": ["--no-such-flag"]})
    release.helm.upgrade(NAME, bad)

    def crashing(seen: Seen) -> bool:
        ends = [
            container.get("lastState", {}).get("terminated", {}).get("message", "")
            for pod in seen.objects.values()
            for container in pod.get("status", {}).get("containerStatuses", [])
        ]
        return any("--no-such-flag" in message for message in ends)

    wait_for(release.kube, "Pod", crashing, "the message", selector=release.selector)
    release.helm.rollback(NAME)
    release.wait_ready()
    with client.load(release.url, LOAD) as load:
        require_whole(load.stop(), len(LOAD))
