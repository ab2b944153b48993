"""Statuses that Kubernetes 1.36 returned: readiness, reasons of failures, ends of containers."""

import copy
from datetime import datetime
from typing import Any

import pytest
from k8s_harness.status import (
    exit_of,
    has_run,
    is_leaving,
    is_ready,
    leaving,
    mount_trouble,
    restarts,
    rolled_out,
    trouble,
)

from tests.unit.k8s_harness.replies import RECORDED

NOW = "2026-11-21T02:28:00Z"
NOW_S = datetime.fromisoformat(NOW).timestamp()
FLAG = "minisgl: error: unknown argument --no-such-flag; see --help"


def waiting(name: str, reason: str) -> dict[str, Any]:
    """A recorded pod whose container waits for another reason."""
    pod = copy.deepcopy(RECORDED[name])
    (container,) = pod["status"]["containerStatuses"]
    container["state"] = {"waiting": {"reason": reason, "message": "back-off 40s"}}
    return pod


@pytest.mark.parametrize(
    ("pod", "words"),
    [
        (RECORDED["crash"], f"crash/minisgl: ended 4 times: {FLAG}"),
        (waiting("crash", "CrashLoopBackOff"), f"crash/minisgl: CrashLoopBackOff: {FLAG}"),
        (RECORDED["oom"], "oom/minisgl: OOMKilled: "),
        (waiting("oom", "CrashLoopBackOff"), "oom/minisgl: OOMKilled: back-off 40s"),
        (waiting("nopull", "ImagePullBackOff"), "nopull/minisgl: ImagePullBackOff: back-off 40s"),
    ],
    ids=["crash", "crash-backoff", "oom", "oom-backoff", "pull-backoff"],
)
def test_a_pod_that_cannot_become_ready_has_a_reason(pod: dict[str, Any], words: str) -> None:
    assert trouble(pod, NOW_S) == words


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nopull", "nopull/minisgl: ErrImagePull: failed to pull and unpack image"),
        ("nosecret", 'nosecret/minisgl: CreateContainerConfigError: secret "none" not found'),
        ("nogpu", "nogpu: Unschedulable: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu"),
    ],
)
def test_recorded_reasons_are_returned(name: str, words: str) -> None:
    assert (trouble(RECORDED[name], NOW_S) or "").startswith(words)


def test_a_pod_that_may_become_ready_is_no_trouble() -> None:
    assert trouble(RECORDED["good"], NOW_S) is None
    assert trouble(waiting("nopull", "ContainerCreating"), NOW_S) is None
    began_s = datetime.fromisoformat("2026-11-21T02:25:58Z").timestamp()
    assert trouble(RECORDED["nogpu"], began_s + 19) is None, "a node may still get room"
    once = copy.deepcopy(RECORDED["crash"])
    once["status"]["containerStatuses"][0]["restartCount"] = 1
    assert trouble(once, NOW_S) is None
    once["status"]["containerStatuses"][0] |= {"restartCount": 4, "state": {"running": {}}}
    assert trouble(once, NOW_S) is None, "it runs again"


def test_a_pod_that_is_being_deleted_is_no_trouble() -> None:
    pod = copy.deepcopy(RECORDED["crash"])
    pod["metadata"]["deletionTimestamp"] = "2026-11-21T02:28:30Z"
    assert trouble(pod, NOW_S) is None
    assert leaving({"crash": pod, "good": RECORDED["good"]}) == ["crash"]


def failed_mount(pod: str, last: str) -> dict[str, Any]:
    """An event of the kubelet, with the time of the first and of the last attempt."""
    message = 'MountVolume.SetUp failed for volume "keys" : secret "minisgl-keys" not found'
    times = {"firstTimestamp": "2026-11-21T02:25:58Z", "lastTimestamp": last}
    target = {"involvedObject": {"kind": "Pod", "name": pod}}
    return {"reason": "FailedMount", "message": message, **target, **times}


def test_a_pod_whose_volume_cannot_be_mounted_has_a_reason() -> None:
    """Its status has no reason: it waits with ContainerCreating."""
    pod = waiting("nosecret", "ContainerCreating")
    assert trouble(pod, NOW_S) is None
    lasting = failed_mount("nosecret", "2026-11-21T02:26:29Z")
    assert mount_trouble(pod, [lasting]) == (
        'nosecret: FailedMount: MountVolume.SetUp failed for volume "keys" : '
        'secret "minisgl-keys" not found'
    )
    short, other = failed_mount("nosecret", "2026-11-21T02:26:05Z"), failed_mount("other", NOW)
    assert mount_trouble(pod, [short, other]) is None, "the volume may still be created"
    assert mount_trouble(RECORDED["good"], [failed_mount("good", NOW)]) is None, "it has started"


def test_a_failed_pod_is_trouble() -> None:
    pod = {"metadata": {"name": "p"}, "status": {"phase": "Failed", "reason": "Evicted"}}
    assert trouble(pod, NOW_S) == "p: Failed: Evicted"


def test_readiness_restarts_and_has_run() -> None:
    assert [n for n in RECORDED if n != "deletion" and is_ready(RECORDED[n])] == ["good"]
    assert (restarts(RECORDED["crash"]), restarts(RECORDED["good"])) == (4, 0)
    assert [has_run(RECORDED[name]) for name in ("good", "crash", "nopull")] == [True, True, False]


def test_the_end_of_a_deleted_pod() -> None:
    """The container ended 23 s before the end of its grace period."""
    alive, asked, ended, _ = RECORDED["deletion"]
    assert [is_leaving(pod) for pod in (alive, asked)] == [False, True]
    assert exit_of(asked, "minisgl") is None
    assert exit_of(ended, "minisgl") == (0, "Completed", 23.0)
    assert exit_of(ended, "other") is None


@pytest.mark.parametrize(
    ("change", "is_done"),
    [
        ({}, True),
        ({"observedGeneration": 3}, False),
        ({"updatedReplicas": 1}, False),
        ({"availableReplicas": 1}, False),
        ({"replicas": 3}, False),
    ],
)
def test_a_rollout_is_done_when_every_count_matches(change: dict[str, int], is_done: bool) -> None:
    counts = dict.fromkeys(("replicas", "updatedReplicas", "availableReplicas"), 2)
    status = {"observedGeneration": 4, **counts, **change}
    meta = {"generation": 4}
    assert rolled_out({"metadata": meta, "spec": {"replicas": 2}, "status": status}) is is_done
    assert not rolled_out({"metadata": meta, "spec": {"replicas": 2}})
