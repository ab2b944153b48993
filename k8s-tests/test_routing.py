"""The data of routers: KV events and rendered prompts. Priorities under load."""

import json
from typing import Any

import pytest
from k8s_harness.client import ClientPod, require_whole
from k8s_harness.kube import Kube
from k8s_harness.release import Release
from k8s_harness.values import cpu

MODEL = "minisgl-demo"
ADMIN = "an-admin-key-for-this-test"
REPLAY_PORT = 5558
ATTEMPTS = 20  # each starts a process in the client pod, which takes a second
ASK = """
import json, urllib.error, urllib.request
url, key, body = ASKED
headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
data = None if body is None else json.dumps(body).encode()
request = urllib.request.Request(url, data, headers)
try:
    with urllib.request.urlopen(request, timeout=120) as answer:
        print(json.dumps([answer.status, json.loads(answer.read())]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, json.loads(error.read())]))
"""


def ask(client: ClientPod, url: str, body: Any = None) -> tuple[int, Any]:
    """Status and JSON of a request that the client pod sends; a GET without a body."""
    status, answer = json.loads(client.python(f"ASKED = {(url, ADMIN, body)!r}\n{ASK}"))
    return int(status), answer


@pytest.fixture(scope="module")
def release(install, image, namespace: Kube) -> Release:
    meta = {"name": "admins"}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": meta}
    namespace.create({**secret, "stringData": {"admin-api-key": ADMIN}})
    values = cpu(image, replicas=2, kvEvents={"enabled": True}, render={"enabled": True})
    values["auth"] = {"adminSecret": "admins"}
    return install(values).wait_ready()


def address_of(release: Release, pod: str) -> str:
    return str(release.kube.need("Pod", pod)["status"]["podIP"])


def index_of(client: ClientPod, address: str) -> dict[str, Any]:
    """The index that a subscriber builds from a replay of the whole stream of a pod."""
    argument = json.dumps({"replay": f"tcp://{address}:{REPLAY_PORT}"})
    status, output = client.kube.execute("client", "python3", "/scripts/kv_index.py", argument)
    assert status == 0, output
    return dict(json.loads(output))


def totals_of(client: ClientPod, address: str) -> dict[str, Any]:
    """The totals of the stream, as the pod counts them."""
    _, info = ask(client, f"http://{address}:1919/server_info")
    return dict(info["stats"]["kv_events"])


def test_an_index_from_the_events_of_each_pod_equals_its_cache(
    release: Release, client: ClientPod
) -> None:
    pods = release.ready_pods()
    assert len(pods) == 2
    for pod in pods:
        address = address_of(release, pod)
        for start in range(4):
            prompt = {"model": MODEL, "prompt": [start + 9] * 200, "max_tokens": 1}
            assert ask(client, f"http://{address}:1919/v1/completions", prompt)[0] == 200
        index, totals = index_of(client, address), totals_of(client, address)
        for _ in range(ATTEMPTS):  # the engine publishes blocks and totals after the answer
            if index["blocks"] >= 12 and index["checksum"] == totals["checksum"]:
                break
            index, totals = index_of(client, address), totals_of(client, address)
        assert index["topic"] == f"kv@{address}:1919@{MODEL}"
        assert index["orphans"] == 0
        assert index["blocks"] >= 12
        assert (index["blocks"], index["checksum"]) == (totals["blocks"], totals["checksum"])


def test_the_render_pods_give_the_tokens_that_an_engine_counts(
    release: Release, client: ClientPod
) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "What is 12 + 30?"}]}
    render = release.url.replace("//minisgl.", "//minisgl-render.") + "/v1/chat/completions"
    status, rendered = ask(client, f"{render}/render", chat)
    assert status == 200
    _, answer = ask(client, f"{release.url}/v1/chat/completions", {**chat, "max_tokens": 1})
    assert len(rendered["token_ids"]) == answer["usage"]["prompt_tokens"]
    status, error = ask(client, render, chat)
    assert (status, error["error"]["code"]) == (501, "renders_only")


def test_a_request_of_the_first_priority_passes_a_full_queue(
    release: Release, client: ClientPod
) -> None:
    """Each pod has 32 rows. The load of a later priority needs more rows than both pods have."""
    with client.load(release.url, [200] * 100, priority=5) as load:
        load.wait(lambda events: bool(events), "a first text")
        for _ in range(4):
            body = {"model": MODEL, "prompt": "Hello", "max_tokens": 4, "priority": -1}
            assert ask(client, f"{release.url}/v1/completions", body)[0] == 200
        waiting = 100 - len(load.ended())
        require_whole(load.stop(), 100)
    assert waiting > 0, "the load ended before the requests of the first priority"
