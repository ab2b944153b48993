"""A stub of the Hugging Face hub on loopback."""

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SHA = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"never fetched",
    "consolidated.safetensors": b"never fetched",
    "original/params.json": b"never fetched",
}
REPOSITORIES = ("owner/good", "owner/bin", "owner/huge", "owner/gated")


class _Handler(BaseHTTPRequestHandler):
    """A hub with the models of REPOSITORIES.

    The weights of owner/huge have 1 PiB. owner/bin has no safetensors file. The files of
    owner/gated can be listed and not read, as those of a gated model of the real hub.
    """

    fetched: list[str]
    files: Mapping[str, bytes]

    def do_HEAD(self) -> None:
        self.answer(send_body=False)

    def do_GET(self) -> None:
        self.answer(send_body=True)

    def answer(self, send_body: bool) -> None:
        path = self.path.split("?")[0].removeprefix("/api/models")
        owner, name, *rest = path.lstrip("/").split("/")
        repo = f"{owner}/{name}"
        sizes = {file: len(body) for file, body in self.files.items()}
        if repo == "owner/huge":
            sizes["model.safetensors"] = 2**50
        if repo == "owner/bin":
            sizes = {"config.json": 0, "pytorch_model.bin": 0}
        if repo not in REPOSITORIES:
            self.reply(404, {"X-Error-Code": "RepoNotFound"})
        elif rest == ["revision", "missing"]:
            self.reply(404, {"X-Error-Code": "RevisionNotFound"})
        elif rest[:1] == ["tree"]:
            tree = [{"type": "file", "path": f, "size": n, "oid": SHA} for f, n in sizes.items()]
            self.reply(200, {}, json.dumps(tree).encode())
        elif rest[:1] != ["resolve"]:
            siblings = [{"rfilename": file} for file in sizes]
            info = {"id": repo, "sha": SHA, "siblings": siblings}
            self.reply(200, {}, json.dumps(info).encode())
        elif repo == "owner/gated":
            self.reply(403, {"X-Error-Code": "GatedRepo"})
        else:
            file = "/".join(rest[2:])
            headers = {"ETag": f'"{file}"', "X-Repo-Commit": SHA}
            if send_body:
                self.fetched.append(file)
                self.reply(200, headers, self.files[file])
            else:
                self.reply(200, headers | {"Content-Length": str(sizes[file])})

    def reply(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def stub_hub(files: Mapping[str, bytes] = FILES) -> Iterator[tuple[str, list[str]]]:
    """Serve a hub. Yields its address for HF_ENDPOINT, and the growing list of the files read.

    files: the files of owner/good and owner/huge.
    """
    fetched: list[str] = []
    handler = type("Handler", (_Handler,), {"fetched": fetched, "files": files})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", fetched
    finally:
        server.shutdown()
        server.server_close()


def settings_for(endpoint: str, home: Path) -> dict[str, str]:
    """Return the environment of a process that uses this hub. home: the folder of its cache."""
    return {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
    }
