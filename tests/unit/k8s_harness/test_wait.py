"""A wait ends with an event, with the reason of a pod that cannot become ready, or by timeout."""

from pathlib import Path

import pytest
from k8s_harness.kube import ApiException
from k8s_harness.objects import Seen
from k8s_harness.wait import Broken, NotInTime, recorded, wait_for

from tests.unit.k8s_harness.replies import PODS, RECORDED, event, listing, replayed
from tests.unit.k8s_harness.test_status import failed_mount, waiting

EVENTS = "/api/v1/namespaces/default/events"
ALIVE, ASKED, ENDED, REMOVED = RECORDED["deletion"]


def test_an_event_ends_the_wait(tmp_path: Path) -> None:
    answers = {f"GET {PODS}": listing(), f"WATCH {PODS}": [[], [event("ADDED", ALIVE)]]}
    with replayed(tmp_path, answers) as (kube, _):
        assert wait_for(kube, "Pod", lambda seen: sorted(seen.objects), "a pod") == ["good"]


def test_a_pod_that_cannot_become_ready_ends_the_wait_with_its_reason(tmp_path: Path) -> None:
    answers = {f"GET {PODS}": listing(RECORDED["crash"])}
    with (
        replayed(tmp_path, answers) as (kube, _),
        pytest.raises(Broken, match=r"ended 4 times: .*--no-such-flag"),
    ):
        wait_for(kube, "Pod", lambda _: False, "nothing", pods="app=minisgl")


def test_a_volume_that_cannot_be_mounted_ends_the_wait(tmp_path: Path) -> None:
    """Without the Secret of auth.keysSecret, a wait once ended after its whole time of 600 s."""
    pod = waiting("nosecret", "ContainerCreating")
    event = failed_mount("nosecret", "2026-11-21T02:26:29Z")
    answers = {f"GET {PODS}": listing(pod), f"GET {EVENTS}": listing(event)}
    with (
        replayed(tmp_path, answers) as (kube, _),
        pytest.raises(Broken, match=r'FailedMount: .*secret "minisgl-keys" not found'),
    ):
        wait_for(kube, "Pod", lambda _: False, "nothing", pods="app=minisgl")


def test_the_timeout_ends_the_wait(tmp_path: Path) -> None:
    with (
        replayed(tmp_path, {f"GET {PODS}": listing()}) as (kube, _),
        pytest.raises(NotInTime, match="waiting for a pod in default after 0 s"),
    ):
        wait_for(kube, "Pod", lambda seen: seen.objects, "a pod", timeout_s=0)


def test_a_recorder_has_the_last_state_of_deleted_objects(tmp_path: Path) -> None:
    changes = [[event("MODIFIED", ASKED)], [event("MODIFIED", ENDED), event("DELETED", REMOVED)]]
    answers = {f"GET {PODS}": listing(ALIVE), f"WATCH {PODS}": changes}
    with replayed(tmp_path, answers) as (kube, _), recorded(kube, "Pod", "") as recorder:
        seen = recorder.wait(lambda seen: "good" in seen.gone, "its end")
    (container,) = seen.gone["good"]["status"]["containerStatuses"]
    assert container["state"]["terminated"]["exitCode"] == 0


def test_a_recorder_raises_the_error_of_its_watch(tmp_path: Path) -> None:
    broken = {"type": "ERROR", "object": {"code": 500}}
    answers = {f"GET {PODS}": listing(), f"WATCH {PODS}": [[], [broken]]}

    def never(_: Seen) -> bool:
        return False

    with (
        replayed(tmp_path, answers) as (kube, _),
        pytest.raises(ApiException),  # raised by the wait below or by the first listing
        recorded(kube, "Pod", "") as recorder,
    ):
        recorder.wait(never, "nothing")
