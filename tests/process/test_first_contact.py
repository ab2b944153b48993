"""Paths, log lines, signals and messages that a new user meets first."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import jinja2
import pytest

import minisgl
from minisgl.demo import model_path
from minisgl.tokenizer.tokenizer import TextTokenizer
from minisgl.utils.supervise import CONFIG_EXIT
from tests.forks import run_forked
from tests.patience import patience
from tests.process.harness import ServerProcess, run_server, wait_for
from tests.stub_hub import settings_for, stub_hub

pytestmark = pytest.mark.process


def get(server: ServerProcess, path: str) -> httpx.Response:
    return httpx.get(server.url + path, timeout=patience())


def test_version_and_ping(stub_server: ServerProcess) -> None:
    assert get(stub_server, "/version").json() == {"version": minisgl.__version__}
    assert get(stub_server, "/ping").status_code == 200


def test_start_ends_with_a_table_and_tokenizer_info_serves_lm_eval() -> None:
    """The calls of lm_eval.utils.RemoteTokenizer: tokens, ids of tokens, and the chat template."""
    ours = TextTokenizer(model_path())
    with run_server("--num-pages", "64") as server:
        server.wait_ready()
        info = get(server, "/tokenizer_info").json()
        assert info["eos_token"] == "<|im_end|>"
        asked = {"prompt": info["eos_token"], "add_special_tokens": False}
        ids = httpx.post(server.url + "/tokenize", json=asked, timeout=patience()).json()["tokens"]
        assert ids == ours.encode_text("<|im_end|>", add_special=False)
        assert info["vocab_size"] > max(ids)
        title, heads, seconds, ready = server.stdout.splitlines()
    assert title == "seconds of the start"
    names = ["processes", "import", "download", "weights", "compile", "kv", "graphs", "warm-up"]
    assert heads.split() == [*names, "total"]
    *phases, total = map(float, seconds.split())
    assert sum(phases) == pytest.approx(total, abs=0.01 * len(phases))
    assert ready.startswith("minisgl serves minisgl-demo")
    chat = [{"role": "user", "content": "hi"}]
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(info["chat_template"])
    assert template.render(messages=chat, add_generation_prompt=True) == ours.render_chat(chat)


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        (
            "POST",
            "/chat/completions",
            "POST /chat/completions does not exist; did you mean '/v1/chat/completions'",
        ),
        ("GET", "/v2/nothing/here", "GET /v2/nothing/here does not exist; /docs lists all paths"),
        ("POST", "/v1/embeddings", "this server has no embeddings"),
    ],
)
def test_unknown_path_names_the_call_and_the_nearest_path(
    stub_server: ServerProcess, method: str, path: str, message: str
) -> None:
    answer = httpx.request(method, stub_server.url + path, timeout=patience())
    assert answer.status_code == 404
    assert message in answer.json()["error"]["message"]


def test_wrong_method_names_the_right_one(stub_server: ServerProcess) -> None:
    answer = get(stub_server, "/v1/completions")
    assert answer.json()["error"]["message"] == "GET /v1/completions is not allowed; use POST"


def test_shell_talks_to_the_server_that_has_the_port_and_prints_answers_only(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Regression: piped input was printed twice, and a taken port was an error."""
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps([["one", "a b"], ["two", "c d"]]))
    with run_server("--model", str(tiny_model), "--api-key", "s", stub=str(rules)) as server:
        port = httpx.URL(server.wait_ready().url).port
        command = [sys.executable, "-m", "minisgl", "--shell", "--port", str(port)]
        done = subprocess.run(
            command,
            input="one\n/reset\ntwo",
            env={**os.environ, "MINISGL_API_KEY": "s"},
            capture_output=True,
            text=True,
            timeout=patience(),
        )
        keyless = subprocess.run(command, input="one\n", capture_output=True, text=True)
        other = subprocess.run(
            [*command, "--served-model-name", "other"],
            input="one\n",
            env={**os.environ, "MINISGL_API_KEY": "s"},
            capture_output=True,
            text=True,
        )
    assert done.stdout == "a b\n(conversation forgotten)\nc d\n"
    assert done.returncode == 0
    assert "set MINISGL_API_KEY" in keyless.stderr
    assert keyless.returncode == 1
    assert "the running server serves tiny, and not other" in other.stderr
    assert (other.returncode, other.stdout) == (1, "")


def test_each_request_has_one_log_line(tiny_model: Path) -> None:
    good = {"model": "tiny", "prompt": "a b", "max_tokens": 2}
    calls = {
        "good": ("/v1/completions", good),
        "bad": ("/v1/completions", {**good, "temperature": 9}),
        "lost": ("/nowhere", good),
        "ids": ("/tokenize", {"prompt": "a"}),
    }
    flags = ("--model", str(tiny_model), "--log-format", "json", "--api-key", "sesame")
    with run_server(*flags, stub="echo") as server:
        server.wait_ready()
        with httpx.Client(base_url=server.url, timeout=patience()) as client:
            for name, (path, body) in calls.items():
                headers = {"x-request-id": name, "authorization": "Bearer sesame"}
                client.post(path, json=body, headers=headers)
            client.get("/v1/models", headers={"x-request-id": "keyless"})
        server.signal(signal.SIGINT)
        assert server.wait_exit() == 0
        lines = [json.loads(line) for line in server.stderr.splitlines() if line[0] == "{"]
    found = {line["request_id"]: line for line in lines if "request_id" in line}
    assert len([line for line in lines if "request_id" in line]) == len(found) == 5, lines
    shown = {
        name: (line["method"], line["path"], line["status"], line.get("reason"), line.get("param"))
        for name, line in found.items()
    }
    assert shown == {
        "good": ("POST", "/v1/completions", 200, None, None),
        "bad": ("POST", "/v1/completions", 400, "InvalidRequest", "temperature"),
        "lost": ("POST", "/nowhere", 404, "RouteNotFound", None),
        "ids": ("POST", "/tokenize", 200, None, None),
        "keyless": ("GET", "/v1/models", 401, "NotAuthenticated", None),
    }
    assert all(line["duration_s"] >= 0 for line in found.values())
    assert found["good"]["completion_tokens"] == 2
    assert found["good"]["message"].startswith("call ended")
    assert found["bad"]["message"].startswith("call refused")


def test_first_ctrl_c_says_how_long_it_waits_and_the_second_ends_streams_with_an_error(
    tiny_model: Path,
) -> None:
    """Regression: a second Ctrl-C cut the streams, and their clients saw a broken connection."""
    text: list[str] = []
    body = {"model": "tiny", "prompt": "a b c", "max_tokens": 2000, "stream": True}
    with run_server("--model", str(tiny_model), "--drain-timeout", "77", stub="echo") as server:
        url = server.wait_ready().url + "/v1/completions"

        def read() -> None:
            with httpx.stream("POST", url, json=body, timeout=patience()) as answer:
                text.extend(answer.iter_text())

        reader = threading.Thread(target=read)
        reader.start()
        wait_for(lambda: server.metrics()["requests_running"], "the stream")
        server.signal(signal.SIGINT)
        told = r"draining open_requests=1: waiting for them, at most 77 s; a second Ctrl-C"
        wait_for(lambda: re.search(told, server.stderr), "the message")
        time.sleep(0.3)  # the launcher takes two signals within 0.2 s as one
        server.signal(signal.SIGINT)
        assert server.wait_exit() == 128 + signal.SIGINT
        reader.join(patience())
    whole = "".join(text)
    assert '"message":"the server is shutting down"' in whole
    assert whole.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": ["SurpriseForCausalLM"]}, "architecture SurpriseForCausalLM is not"),
        ({}, "tokenizer.json cannot be read"),
    ],
)
def test_model_that_cannot_be_served_is_refused_before_its_weights_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], expected: str
) -> None:
    config = json.loads((model_path() / "config.json").read_text()) | changes
    files = {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": b"{}",
        "model.safetensors": b"weights",
    }
    with stub_hub(files) as (endpoint, fetched):
        for name, value in settings_for(endpoint, tmp_path).items():
            monkeypatch.setenv(name, value)
        with run_server("serve", "owner/good", "--device", "cpu", fresh=True) as server:
            assert server.wait_exit() == CONFIG_EXIT, server.stderr
            assert expected in server.stderr.splitlines()[-1]
    assert set(fetched) == {"config.json", "tokenizer.json"}


def test_model_that_can_be_served_passes_the_check_before_its_weights_are_downloaded() -> None:
    code = (
        "from minisgl.core import EngineConfig\n"
        "from minisgl.settings.child import check_before_weights\n"
        f"check_before_weights(EngineConfig(model_path=''), {str(model_path())!r})"
    )
    done = run_forked(["-c", code], patience())
    assert done.returncode == 0, done.stderr
