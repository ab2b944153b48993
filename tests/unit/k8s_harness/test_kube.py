"""Requests to the API server and the interpretation of its responses."""

import itertools
import json
from pathlib import Path

import pytest
from k8s_harness.kube import ApiException, Kube
from k8s_harness.providers import Access, ProviderError

from tests.unit.k8s_harness.replies import PODS, RECORDED, event, listing, replayed

ALIVE, ASKED, ENDED, REMOVED = RECORDED["deletion"]


def test_an_unknown_context_is_refused_in_one_line(tmp_path: Path) -> None:
    with replayed(tmp_path, {"GET /version": {"gitVersion": "v1.36.2"}}) as (kube, _):
        kubeconfig = kube.access.kubeconfig
        assert Kube.connect(kube.access).version == "v1.36.2"
        with pytest.raises(
            ProviderError, match=r"no usable context 'lab' .*get-contexts"
        ) as refused:
            Kube.connect(Access(kubeconfig, "lab"))
    assert "\n" not in str(refused.value)


def test_an_api_server_that_refuses_or_does_not_answer_gives_one_line(tmp_path: Path) -> None:
    with (
        replayed(tmp_path, {"GET /version": 401}) as (kube, _),
        pytest.raises(ProviderError, match="context 'replay' refuses requests: 401") as refused,
    ):
        Kube.connect(kube.access)
    with pytest.raises(ProviderError, match="context 'replay' does not answer") as silent:
        Kube.connect(kube.access)
    assert "\n" not in str(refused.value) + str(silent.value)


def test_discovery_finds_kinds_in_their_groups(tmp_path: Path) -> None:
    with replayed(tmp_path, {}) as (kube, _):
        assert kube.serves("apps/v1", "Deployment")
        assert kube.serves("events.k8s.io/v1", "Event")
        assert not kube.serves("keda.sh/v1alpha1", "ScaledObject")
        assert kube.resources["Event"].root == "/api/v1", "the core group comes first"


def test_a_list_request_has_namespace_selector_and_name(tmp_path: Path) -> None:
    answers = {f"GET {PODS}": listing(), "GET /api/v1/namespaces/other/pods": listing()}
    with replayed(tmp_path, answers) as (kube, server):
        kube.all("Pod", "a=b", "one")
        kube.within("other").all("Pod")
        asked = [line for line in server.asked if "pods" in line]
    query = "labelSelector=a%3Db&fieldSelector=metadata.name%3Done"
    assert asked == [f"GET {PODS}?{query}", "GET /api/v1/namespaces/other/pods"]


def test_items_of_a_list_have_kind_and_version(tmp_path: Path) -> None:
    with replayed(tmp_path, {f"GET {PODS}": listing(ALIVE)}) as (kube, _):
        (pod,) = kube.all("Pod")
    assert (pod["kind"], pod["apiVersion"]) == ("Pod", "v1")


def test_a_missing_object_is_none_and_other_errors_are_raised(tmp_path: Path) -> None:
    answers = {f"GET {PODS}/hidden": 403, f"DELETE {PODS}/hidden": 403}
    with replayed(tmp_path, answers) as (kube, _):
        assert kube.get("Pod", "none") is None
        kube.delete("Pod", "none")
        for act in (kube.get, kube.delete):
            with pytest.raises(ApiException):
                act("Pod", "hidden")
        with pytest.raises(AssertionError, match="no Pod none in default"):
            kube.need("Pod", "none")


def test_an_eviction_returns_its_status(tmp_path: Path) -> None:
    answers = {f"POST {PODS}/a/eviction": {}, f"POST {PODS}/b/eviction": 429}
    with replayed(tmp_path, answers) as (kube, server):
        assert (kube.evict("a"), kube.evict("b")) == (201, 429)
        body = json.loads(server.asked[-1].split(" ", 2)[2])
    assert (body["kind"], body["metadata"]["name"]) == ("Eviction", "b")


def test_a_patch_and_a_grace_period_are_sent(tmp_path: Path) -> None:
    path = "/apis/apps/v1/namespaces/default/deployments/minisgl/scale"
    answers = {f"PATCH {path}": {}, f"DELETE {PODS}/a": {}}
    with replayed(tmp_path, answers) as (kube, server):
        kube.patch("Deployment", "minisgl", {"spec": {"replicas": 3}}, part="scale")
        kube.delete("Pod", "a", grace_s=1)
    assert server.asked[-2] == f'PATCH {path} {{"spec": {{"replicas": 3}}}}'
    assert server.asked[-1].startswith(f"DELETE {PODS}/a?gracePeriodSeconds=1")


def test_a_watch_keeps_the_last_state_of_deleted_objects(tmp_path: Path) -> None:
    changes = [[event("MODIFIED", ASKED), event("MODIFIED", ENDED)], [event("DELETED", REMOVED)]]
    answers = {f"GET {PODS}": listing(ALIVE), f"WATCH {PODS}": changes}
    with replayed(tmp_path, answers) as (kube, server):
        for seen in kube.follow("Pod"):
            if seen.gone:
                break
        watches = [line for line in server.asked if line.startswith("WATCH")]
    assert seen.objects == {}
    # The kubelet sets an earlier deletionTimestamp at the end; the watch keeps the first one.
    assert REMOVED["metadata"]["deletionTimestamp"] == "2026-11-21T02:27:22Z"
    assert seen.gone["good"]["metadata"]["deletionTimestamp"] == "2026-11-21T02:27:44Z"
    assert "resourceVersion=1&" in watches[0]
    assert "resourceVersion=2&" in watches[1], "the next watch continues at the last version"


def test_a_watch_that_is_too_old_lists_again(tmp_path: Path) -> None:
    old = {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}
    answers = {
        f"GET {PODS}": [listing(ALIVE), listing(version="9")],
        f"WATCH {PODS}": [[old]],
    }
    with replayed(tmp_path, answers) as (kube, _):
        states = [sorted(s.objects) for s in itertools.islice(kube.follow("Pod"), 2)]
        assert states == [["good"], []]


def test_a_watch_that_fails_raises(tmp_path: Path) -> None:
    broken = {"type": "ERROR", "object": {"code": 500, "message": "etcd is gone"}}
    answers = {f"GET {PODS}": listing(), f"WATCH {PODS}": [[broken]]}
    with replayed(tmp_path, answers) as (kube, _), pytest.raises(ApiException, match="etcd"):
        for _ in kube.follow("Pod"):
            pass


def test_a_probe_returns_0_for_an_answer_of_the_api_server(tmp_path: Path) -> None:
    """The API server itself answers 503 for a pod that does not answer yet."""
    with replayed(tmp_path, {f"GET {PODS}/a:1919/proxy/readyz": 503}) as (kube, _):
        assert kube.probe("a", "/readyz")[0] == 0
