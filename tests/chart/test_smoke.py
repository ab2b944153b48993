"""Runs the program of `helm test` against a small server with the same routes."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from minisgl.settings.keys import key_hashes
from tests.chart.helm import CHART, pick
from tests.patience import patience

GOOD = {
    "/readyz": "{}",
    "/v1/models": json.dumps({"data": [{"id": "tiny"}]}),
    "/v1/completions": json.dumps({"choices": [{"text": " x"}], "usage": {"completion_tokens": 1}}),
    "/metrics": "# TYPE minisgl_requests_total counter\n",
}


class Stub(ThreadingHTTPServer):
    """Answers from a table. The first request for /readyz gets 503, as from a loading server."""

    def __init__(self, answers: dict[str, str], key: str | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = answers
        self.key = key
        self.asked: list[str] = []


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        loading = self.server.asked == ["/readyz"]
        allowed = self.server.key in (None, self.headers.get("Authorization"))
        status = 503 if loading else 200 if allowed else 401
        self.send_response(status)
        self.end_headers()
        self.wfile.write(self.server.answers[self.path].encode())

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def script(render) -> list[str]:
    """The command of the rendered pod, with this interpreter."""
    container = pick(render(), "Pod")["spec"]["containers"][0]
    assert container["command"] == ["python3", "-c"]
    assert container["args"][1] == "http://minisgl.llm.svc:1919"
    return [sys.executable, "-c", container["args"][0]]


def run(
    script: list[str], answers: dict[str, str], key: str | None = None, **environment: str
) -> tuple[int, str, list[str]]:
    server = Stub(answers, key and f"Bearer {key}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {**os.environ, **environment}
    done = subprocess.run(
        [*script, f"http://127.0.0.1:{server.server_port}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(),
    )
    server.shutdown()
    server.server_close()
    return done.returncode, done.stdout + done.stderr, server.asked


def test_the_program_waits_for_readiness_and_uses_the_api(script):
    code, out, asked = run(script, GOOD)
    assert (code, out) == (0, "ok: tiny answered ' x'\n")
    assert asked == ["/readyz", "/readyz", "/v1/models", "/v1/completions", "/metrics"]


def test_the_program_sends_the_key(script):
    """A Secret made from a file ends with a newline, which the server strips."""
    assert run(script, GOOD, key="k", API_KEY="k\n")[0] == 0


@pytest.mark.parametrize(
    ("lines", "key"),
    [
        ("search: k1\nchat: k2\n", "k1"),
        ("\n batch priority=-5:\tk3 \n", "k3"),
        ("a key:with a colon\n", "a key:with a colon"),
    ],
)
def test_the_program_sends_the_first_key_of_a_key_file(script, tmp_path, lines, key):
    """A release whose only keys were in auth.keysSecret once failed the test with 401."""
    keys = tmp_path / "keys"
    keys.write_text(lines)
    assert key_hashes([], str(keys)).keys() >= key_hashes([key], None).keys()
    assert run(script, GOOD, key=key, KEYS_FILE=str(keys))[0] == 0


@pytest.mark.parametrize(
    ("auth", "variable"),
    [
        ({"keysSecret": "team"}, "KEYS_FILE"),
        ({"keysSecret": "team", "existingSecret": "s"}, "API_KEY"),
        ({"apiKey": "k"}, "API_KEY"),
    ],
)
def test_the_pod_has_a_key_of_the_release(render, auth, variable):
    pod = pick(render({"auth": auth}), "Pod")["spec"]
    (container,) = pod["containers"]
    assert [entry["name"] for entry in container["env"]] == [variable]
    if variable == "KEYS_FILE":
        assert pod["volumes"] == [{"name": "keys", "secret": {"secretName": "team"}}]
        (mount,) = container["volumeMounts"]
        assert (mount["name"], mount["readOnly"]) == ("keys", True)
        assert container["env"][0]["value"] == mount["mountPath"] + "/keys"


def test_a_failure_names_the_reason(script):
    answers = {**GOOD, "/metrics": "# nothing\n"}
    code, out, _ = run(script, answers)
    assert code == 1
    assert "/metrics does not contain minisgl_requests_total" in out


def test_the_pod_runs_the_script_of_the_chart(script):
    ours = (CHART / "files" / "smoke.py").read_text()
    assert script[2].strip() == ours.strip()
