"""The dump of a namespace contains everything except secrets."""

import base64
import json
from pathlib import Path
from typing import Any

from k8s_harness.dump import HIDDEN, dump_namespace, event_lines, secrets_of, without_secrets

from tests.unit.k8s_harness.replies import PODS, RECORDED, listing, replayed

KEY = "a-key-that-must-not-appear"
NS = "/api/v1/namespaces/default"


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def test_secret_values_are_found_plain_and_in_base64_the_longest_first() -> None:
    found = secrets_of([{"data": {"k": encoded(KEY), "short": encoded("no")}}, {"data": None}])
    assert found == [encoded(KEY), KEY]


def test_secret_variables_are_hidden_and_long_fields_are_dropped() -> None:
    env = [
        {"name": "HF_TOKEN", "value": "hf_x"},
        {"name": "admin_password", "value": "p"},
        {"name": "HF_HOME", "value": "/cache"},
        {"name": "API_KEY", "valueFrom": {"secretKeyRef": {"name": "s"}}},
    ]
    thing: dict[str, Any] = {"metadata": {"name": "p", "managedFields": [1]}, "spec": {"env": env}}
    before = json.dumps(thing)
    shown = without_secrets(thing)
    assert shown["metadata"] == {"name": "p"}
    assert [v.get("value") for v in shown["spec"]["env"]] == [HIDDEN, HIDDEN, "/cache", None]
    assert json.dumps(thing) == before, "the original must not change"


def test_each_event_is_one_line_and_the_oldest_comes_first() -> None:
    about = {"kind": "Pod", "name": "p"}
    late = {"lastTimestamp": "2026-11-21T02:00:00Z", "involvedObject": about, "count": 3}
    early = {"eventTime": "2026-11-21T01:00:00Z", "involvedObject": about, "lastTimestamp": None}
    lines = event_lines(
        [{**late, "type": "Warning", "reason": "BackOff", "message": "again\n"}, early]
    ).splitlines()
    assert lines[0].startswith("2026-11-21T01:00:00Z")
    assert lines[1] == "2026-11-21T02:00:00Z Warning Pod/p BackOff x3: again"


def test_a_namespace_is_dumped_without_its_secrets(tmp_path: Path) -> None:
    """The key is in the objects, the events and both logs, and in none of the files."""
    container = {"name": "minisgl", "args": [f"--api-key={KEY}"]}
    pod = {**RECORDED["crash"], "spec": {"containers": [container]}}
    secret = {"metadata": {"name": "clients"}, "data": {"api-key": encoded(KEY)}}
    about = {"involvedObject": {"kind": "Pod", "name": "crash"}, "message": f"tried {KEY}"}
    answers = {
        f"GET {PODS}": listing(pod),
        f"GET {NS}/secrets": listing(secret),
        f"GET {NS}/events": listing({**about, "metadata": {"name": "e"}}),
        "GET /apis/apps/v1/namespaces/default/deployments": listing(),
        f"GET {PODS}/crash/log": f"started with {KEY}\n",
    }
    folder = tmp_path / "artifacts"
    with replayed(tmp_path, answers) as (kube, server):
        dump_namespace(kube, folder)
        logs = [line for line in server.asked if "/log" in line]
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    assert sorted(texts) == [
        "crash.minisgl.log",
        "crash.minisgl.previous.log",
        "events.txt",
        "objects.yaml",
    ]
    assert [line.endswith("previous=true") for line in logs] == [False, True]
    assert texts["crash.minisgl.log"] == f"started with {HIDDEN}\n"
    assert f"--api-key={HIDDEN}" in texts["objects.yaml"]
    for name, text in texts.items():
        assert text, name
        assert KEY not in text, name
        assert encoded(KEY) not in text, name
        assert "api-key:" not in text, "the Secret itself must not be there"
