"""The event stream of a running server, and a server that only renders prompts."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import psutil
import pytest
import zmq
from k8s_harness.incluster.kv_index import BlockIndex

from minisgl.kv_events.messages import EventBatch
from tests.patience import patience
from tests.process.harness import ServerProcess, run_server, wait_for

pytestmark = pytest.mark.process

ADMIN = {"authorization": "Bearer root"}


def totals(server: ServerProcess) -> dict[str, Any]:
    answer = httpx.get(server.url + "/server_info", headers=ADMIN, timeout=patience())
    return dict(answer.json()["stats"]["kv_events"])


def complete(server: ServerProcess, prompt: list[int], **body: Any) -> None:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, **body}
    url = server.url + "/v1/completions"
    httpx.post(url, json=body, timeout=patience()).raise_for_status()


def replayed(address: str) -> tuple[BlockIndex, set[bytes]]:
    """The index after a replay of the whole stream, and the topics."""
    index, topics = BlockIndex(), set()
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, int(patience() * 1000))
        socket.connect(address)
        socket.send_multipart([b"", (0).to_bytes(8)])
        while True:
            _, topic, _, payload = socket.recv_multipart()
            if not payload:
                return index, topics
            topics.add(topic)
            for event in msgspec.msgpack.decode(payload, type=EventBatch).events:
                index.apply(event)


def test_an_index_kept_from_the_events_equals_the_cache(tiny_model: Path, tmp_path: Path) -> None:
    """Two ranks have one stream together. The pool is small, so blocks are evicted."""
    live, replay = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay"
    flags = ("--num-pages", "64", "--tp", "2", "--admin-api-key", "root")
    events = ("--kv-events-endpoint", live, "--kv-events-replay-endpoint", replay)
    sizes = ("--kv-events-block-size", "32", "--kv-events-pod", "pod-7")
    with run_server("--model", str(tiny_model), *flags, *events, *sizes) as server:
        server.wait_ready()
        with zmq.Context.instance().socket(zmq.SUB) as subscriber:
            subscriber.subscribe(b"kv@")
            subscriber.connect(live)
            for start in range(12):
                complete(server, [start + 5] * 40 + [7] * 100, cache_salt="s" * (start % 2))
        complete(server, [3] * 140)

        # The engine publishes the blocks of a request, and its totals, after the answer.
        def agrees() -> bool:
            (index, _), found = replayed(replay), totals(server)
            sizes = index.blocks, found["blocks"], found["stored"] - found["removed"]
            return (
                found["removed"] > 0
                and len({*sizes}) == 1
                and index.checksum == found["checksum"]
                and index.match(np.array([3] * 140, dtype=np.int32), 32) == 128
            )

        wait_for(agrees, lambda: f"equal: {totals(server)} and {vars(replayed(replay)[0])}")
        index, topics = replayed(replay)
        assert topics == {b"kv@pod-7@tiny"}
        assert (index.orphans, totals(server)["dropped"]) == (0, 0)
        series = "kv_event_blocks_total{event=stored}"
        wait_for(lambda: server.metrics()[series] > 0, "the metric")


def test_a_taken_address_ends_the_start_with_a_reason(tiny_model: Path, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/missing/folder"
    with run_server("--model", str(tiny_model), "--kv-events-endpoint", address) as server:
        assert server.wait_exit() != 0
        assert f"the KV events cannot be published at {address}" in server.stderr


@pytest.fixture(scope="module")
def renderer(tiny_model: Path) -> Iterator[ServerProcess]:
    with run_server("--model", str(tiny_model), "--render-only", fresh=True) as server:
        yield server.wait_ready()


def test_a_renderer_gives_the_tokens_that_an_engine_counts(
    renderer: ServerProcess, real_server: ServerProcess
) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    url = "/v1/chat/completions"
    answer = httpx.post(real_server.url + url, json=chat, timeout=patience()).json()
    for server in (renderer, real_server):
        rendered = httpx.post(server.url + url + "/render", json=chat, timeout=patience()).json()
        assert len(rendered["token_ids"]) == answer["usage"]["prompt_tokens"]
        assert rendered["model"] == "tiny"
    body = {"model": "tiny", "prompt": ["one", [5, 6]], "cache_salt": "x", "priority": 3}
    url = renderer.url + "/v1/completions/render"
    first, second = httpx.post(url, json=body, timeout=patience()).json()
    assert second["token_ids"] == [5, 6]
    assert (first["cache_salt"], first["priority"]) == ("x", 3)


def test_a_renderer_loads_no_engine(renderer: ServerProcess) -> None:
    assert set(renderer.child_pids()) == {"api", "tokenizer-0"}
    pids = [renderer.pid, *renderer.child_pids().values()]
    used = sum(psutil.Process(pid).memory_full_info().uss for pid in pids)
    assert used < 400 * 2**20
    assert "renders prompts of tiny" in renderer.stdout
    models = httpx.get(renderer.url + "/v1/models", timeout=patience()).json()
    assert models["data"][0]["max_model_len"] > 0
    prompt = {"model": "tiny", "prompt": "hello"}
    tokens = httpx.post(renderer.url + "/tokenize", json=prompt, timeout=patience()).json()
    body = {"model": "tiny", "tokens": tokens["tokens"]}
    text = httpx.post(renderer.url + "/detokenize", json=body, timeout=patience()).json()
    assert text["prompt"] == "hello"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
def test_a_renderer_refuses_to_generate_by_name(renderer: ServerProcess, path: str) -> None:
    answer = httpx.post(renderer.url + path, json={}, timeout=patience())
    assert answer.status_code == 501
    error = answer.json()["error"]
    assert error["code"] == "renders_only"
    assert path in error["message"]
    assert "--render-only" in error["message"]


def test_a_renderer_drains_after_a_signal(tiny_model: Path) -> None:
    with run_server("--model", str(tiny_model), "--render-only", "--drain-grace", "0") as server:
        server.wait_ready()
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0
