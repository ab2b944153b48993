"""A substitute for the API server: each request gets the next prepared answer of its path."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from k8s_harness.kube import Kube
from k8s_harness.providers import Access

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "recorded.json").read_text())
VERBS = ["get", "list", "watch"]
PODS = "/api/v1/namespaces/default/pods"


def group(name: str | None, version: str, **plurals: str) -> dict[str, Any]:
    """One group of the aggregated discovery. plurals: resource name by kind, all namespaced."""
    resources = [
        {"resource": plural, "responseKind": {"kind": kind}, "scope": "Namespaced", "verbs": VERBS}
        for kind, plural in plurals.items()
    ]
    meta = {} if name is None else {"name": name}
    return {"metadata": meta, "versions": [{"version": version, "resources": resources}]}


DISCOVERY = {
    "/api": {"items": [group(None, "v1", Pod="pods", Secret="secrets", Event="events")]},
    "/apis": {
        "items": [
            group("apps", "v1", Deployment="deployments"),
            group("events.k8s.io", "v1", Event="events"),
            group("policy", "v1"),
        ]
    },
}


def listing(*items: dict[str, Any], version: str = "1") -> dict[str, Any]:
    meta = {"resourceVersion": version}
    return {"kind": "PodList", "apiVersion": "v1", "metadata": meta, "items": list(items)}


def event(kind: str, item: dict[str, Any], version: str = "2") -> dict[str, Any]:
    meta = {**item.get("metadata", {}), "resourceVersion": version}
    return {"type": kind, "object": {**item, "metadata": meta}}


class Replay(ThreadingHTTPServer):
    """answers: by "METHOD PATH" or "WATCH PATH".

    A list gives one answer per request; its last answer repeats, except for a watch.
    """

    daemon_threads = True

    def __init__(self, answers: dict[str, Any]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        found = {f"GET {path}": answer for path, answer in DISCOVERY.items()}
        self.answers = {**found, **answers}
        self.asked: list[str] = []

    def next_answer(self, key: str) -> Any:
        answer = self.answers.get(key)
        if isinstance(answer, list) and key.split()[0] != "WATCH":
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        elif isinstance(answer, list):
            answer = answer.pop(0) if answer else []
        return answer


class _Handler(BaseHTTPRequestHandler):
    server: Replay

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        method = "WATCH" if "watch=true" in parts.query else self.command
        size = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(size).decode()
        self.server.asked.append(f"{method} {self.path} {body}".strip())
        answer = self.server.next_answer(f"{method} {parts.path}")
        status = 200
        if isinstance(answer, int):
            status, answer = answer, {"kind": "Status", "code": answer}
        elif answer is None:
            status, answer = 404, {"kind": "Status", "code": 404}
        is_text = isinstance(answer, str)
        lines = answer if method == "WATCH" and status == 200 else [answer]
        text = answer if is_text else "".join(json.dumps(line) + "\n" for line in lines)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_POST = do_PATCH = do_DELETE = _answer

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def replayed(folder: Path, answers: dict[str, Any]) -> Iterator[tuple[Kube, Replay]]:
    """Yields a Kube and the substitute API server that it uses."""
    with Replay(answers) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "replay", "cluster": {"server": url}}],
            "users": [{"name": "user", "user": {}}],
            "contexts": [{"name": "replay", "context": {"cluster": "replay", "user": "user"}}],
        }
        path = folder / "kubeconfig"
        path.write_text(yaml.safe_dump(config))
        try:
            yield Kube(Access(str(path), "replay")), server
        finally:
            server.shutdown()
