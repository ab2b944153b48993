"""Resolving a model name: local folders, and a stub of the hub on loopback."""

import contextlib
import errno
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from minisgl.core import ConfigError
from minisgl.settings import hub as hub_module
from minisgl.settings.hub import resolve_model
from tests.patience import patience

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


class StubHub(BaseHTTPRequestHandler):
    """A hub with the repositories owner/good, owner/bin and owner/gated, and no others."""

    fetched: list[str]

    def do_HEAD(self) -> None:
        self.answer(send_body=False)

    def do_GET(self) -> None:
        self.answer(send_body=True)

    def answer(self, send_body: bool) -> None:
        path = self.path.split("?")[0]
        if "owner/gated" in path:
            self.reply(403, b"{}", send_body, {"X-Error-Code": "GatedRepo"})
        elif path.startswith("/api/models/owner/good/revision/missing"):
            self.reply(404, b"{}", send_body, {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith(("/api/models/owner/good/tree", "/api/models/owner/bin/tree")):
            tree = [
                {"type": "file", "path": name, "size": len(FILES[name]), "oid": SHA}
                for name in self.listing(path)
            ]
            self.reply(200, json.dumps(tree).encode(), send_body, {})
        elif path.startswith(("/api/models/owner/good", "/api/models/owner/bin")):
            siblings = [{"rfilename": name} for name in self.listing(path)]
            info = {"id": "owner/good", "sha": SHA, "siblings": siblings}
            self.reply(200, json.dumps(info).encode(), send_body, {})
        elif f"/resolve/{SHA}/" in path:
            name = path.rpartition(f"/resolve/{SHA}/")[2]
            if send_body:
                self.fetched.append(name)
            headers = {"ETag": f'"{name}"', "X-Repo-Commit": SHA}
            self.reply(200, FILES[name], send_body, headers)
        else:
            self.reply(404, b"{}", send_body, {"X-Error-Code": "RepoNotFound"})

    def listing(self, path: str) -> list[str]:
        return ["config.json", "pytorch_model.bin"] if "owner/bin" in path else list(FILES)

    def reply(self, status: int, body: bytes, send_body: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if send_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Hub:
    def __init__(self, endpoint: str, home: Path, fetched: list[str]) -> None:
        self.endpoint = endpoint
        self.home = home
        self.fetched = fetched

    def resolve(
        self, name: str, revision: str | None = None, weights: bool = True, **env: str
    ) -> str:
        """Run resolve_model in a process of its own: huggingface_hub reads HF_* at import."""
        code = (
            "import sys\n"
            "from minisgl.core import ConfigError\n"
            "from minisgl.settings.hub import resolve_model\n"
            "try:\n"
            f"    print('PATH', resolve_model({name!r}, {revision!r}, {weights}))\n"
            "except ConfigError as error:\n"
            "    print('ERROR', error)\n"
            "print('TORCH', 'torch' in sys.modules)\n"
        )
        done = self.run(code, **env)
        assert "TORCH False" in done.stdout
        return next(line for line in done.stdout.splitlines() if line[:4] in ("PATH", "ERRO"))

    def run(self, code: str, **env: str) -> "subprocess.CompletedProcess[str]":
        settings = {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(self.home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "PATH": "/usr/bin:/bin",
            "NO_PROXY": "127.0.0.1",
        }
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=settings | env,
            capture_output=True,
            text=True,
            timeout=patience(120),
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    fetched: list[str] = []
    handler = type("Handler", (StubHub,), {"fetched": fetched})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield Hub(f"http://127.0.0.1:{server.server_port}", tmp_path / "home", fetched)
    server.shutdown()
    server.server_close()


def test_hub_id_downloads_only_what_is_needed_and_works_offline_afterwards(hub: Hub) -> None:
    first = hub.resolve("owner/good")
    assert first.startswith("PATH "), first
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert set(hub.fetched) == wanted
    assert {path.name for path in Path(first[5:]).iterdir()} == wanted
    assert hub.resolve("owner/good", HF_HUB_OFFLINE="1") == first


def test_download_logs_its_progress_where_stderr_is_no_terminal(hub: Hub) -> None:
    """Regression: a download of minutes wrote nothing to the log of a container."""
    code = (
        "from minisgl.settings.hub import resolve_model\n"
        "from minisgl.utils import setup_logging, startup\n"
        "setup_logging('launcher', 'info')\n"
        "startup._LOG_INTERVAL_S = 0.0\n"
        "resolve_model('owner/good')\n"
    )
    lines = hub.run(code).stderr.splitlines()
    assert any("minisgl.utils.startup: Fetching" in line and "/4" in line for line in lines), lines
    assert all(" INFO " in line for line in lines), "no bar is among the lines"


def test_without_weights_the_configuration_is_enough(hub: Hub, tmp_path: Path) -> None:
    found = hub.resolve("owner/good", weights=False)
    assert found.startswith("PATH "), found
    assert set(hub.fetched) == {"config.json", "tokenizer.json", "chat_template.jinja"}
    (tmp_path / "config.json").write_bytes(FILES["config.json"])
    assert hub.resolve(str(tmp_path), weights=False) == f"PATH {tmp_path}"
    assert "no *.safetensors" in hub.resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "revision", "says"),
    [
        ("owner/absent", None, "neither a local folder nor on the hub"),
        ("owner/gated", None, "is gated"),
        ("owner/good", "missing", "has no revision missing"),
        ("owner/bin", None, "has no *.safetensors"),
        ("owner/not a name", None, "valid hub id"),
    ],
)
def test_hub_id_that_cannot_be_used_gives_a_one_line_error(
    hub: Hub, name: str, revision: str | None, says: str
) -> None:
    line = hub.resolve(name, revision)
    assert line.startswith(f"ERROR model {name}")
    assert says in line


def test_unreachable_hub_gives_a_one_line_error(hub: Hub) -> None:
    line = hub.resolve("owner/good", HF_HUB_OFFLINE="1")
    assert "is not in the local cache" in line


def test_folder_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="does not exist"):
        resolve_model("~/model")
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_model("~/model")
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is a file"):
        resolve_model(str(folder / "config.json"))
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors file \(only pytorch_model\.bin"):
        resolve_model("~/model")
    (folder / "model.safetensors").touch()
    assert resolve_model("~/model") == str(folder)


@pytest.mark.parametrize("closed", ["", "model"], ids=["above the model", "the model's own"])
def test_folder_that_the_user_cannot_enter_is_named(
    closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the error was a traceback that did not name the folder."""
    with as_unprivileged_user(), tempfile.TemporaryDirectory() as base:
        outer = Path(base) / "outer"
        (outer / "model").mkdir(parents=True)
        (outer / "model" / "config.json").write_text("{}")
        monkeypatch.chdir(outer)
        (outer / closed).chmod(0)
        try:
            with pytest.raises(ConfigError) as refused:
                resolve_model("model")
        finally:
            (outer / closed).chmod(0o700)
            monkeypatch.undo()
    (line,) = str(refused.value).splitlines()
    named = Path("outer", closed) if closed else Path("outer")
    assert f"has no permission for the folder {Path(base) / named}; " in line


def test_cache_folder_that_the_user_cannot_write_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def download(*arguments: object) -> Path:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "hub" / "x.json"))

    monkeypatch.setattr(hub_module, "_download", download)
    with pytest.raises(ConfigError, match=f"no permission for the folder {tmp_path}; "):
        resolve_model("owner/name")


@contextlib.contextmanager
def as_unprivileged_user() -> Iterator[None]:
    """Run the block as a normal user, because file permissions do not apply to root."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
