"""Resolving a model name: local folders, and a stub of the hub on loopback."""

import contextlib
import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl.core import ConfigError
from minisgl.settings import hub as hub_module
from minisgl.settings.hub import resolve_model
from tests.patience import patience
from tests.stub_hub import FILES, settings_for, stub_hub


class Hub:
    def __init__(self, endpoint: str, home: Path, fetched: list[str]) -> None:
        self.endpoint = endpoint
        self.home = home
        self.fetched = fetched

    def resolve(
        self,
        name: str,
        revision: str | None = None,
        weights: bool = True,
        refusal: str = "",
        **env: str,
    ) -> str:
        """Run resolve_model in a process of its own: huggingface_hub reads HF_* at import.

        refusal: the message with which the check before the weights refuses the model.
        """
        (line,) = self.resolve_each([(name, revision)], weights, refusal, **env)
        return line

    def resolve_each(
        self,
        models: list[tuple[str, str | None]],
        weights: bool = True,
        refusal: str = "",
        **env: str,
    ) -> list[str]:
        """Do as `resolve` for several names and revisions, in one process."""
        code = (
            "import sys\n"
            "from minisgl.core import ConfigError\n"
            "from minisgl.settings.hub import resolve_model\n"
            "def check(folder):\n"
            f"    if {refusal!r}:\n"
            f"        raise ConfigError({refusal!r})\n"
            f"for name, revision in {models!r}:\n"
            "    try:\n"
            f"        print('PATH', resolve_model(name, revision, {weights}, check))\n"
            "    except ConfigError as error:\n"
            "        print('ERROR', error)\n"
            "print('TORCH', 'torch' in sys.modules)\n"
        )
        done = self.run(code, **env)
        assert "TORCH False" in done.stdout
        return [line for line in done.stdout.splitlines() if line[:4] in ("PATH", "ERRO")]

    def run(self, code: str, **env: str) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"PATH": "/usr/bin:/bin", **settings_for(self.endpoint, self.home)} | env,
            capture_output=True,
            text=True,
            timeout=patience(120),
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with stub_hub() as (endpoint, fetched):
        yield Hub(endpoint, tmp_path / "home", fetched)


def test_hub_id_downloads_only_what_is_needed_and_works_offline_afterwards(hub: Hub) -> None:
    first = hub.resolve("owner/good")
    assert first.startswith("PATH "), first
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert set(hub.fetched) == wanted
    assert hub.fetched[-1] == "model.safetensors"
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


def test_hub_id_that_cannot_be_used_gives_a_one_line_error(hub: Hub) -> None:
    huge = "has 1048576.0 GiB of weights to download, and the disk of the cache"
    cases = [
        ("owner/absent", None, "neither a local folder nor on the hub"),
        ("owner/gated", None, "is gated"),
        ("owner/good", "missing", "has no revision missing"),
        ("owner/bin", None, "has no *.safetensors"),
        ("owner/huge", None, huge),
        ("owner/not a name", None, "valid hub id"),
    ]
    lines = hub.resolve_each([(name, revision) for name, revision, _ in cases])
    for line, (name, _, says) in zip(lines, cases, strict=True):
        assert line.startswith(f"ERROR model {name}")
        assert says in line
    assert "model.safetensors" not in hub.fetched


def test_a_hub_that_cannot_be_reached_gives_a_one_line_error(hub: Hub) -> None:
    line = hub.resolve("owner/good", HF_ENDPOINT="http://127.0.0.1:1")
    assert line.startswith("ERROR model owner/good is not in the local cache")


def test_offline_an_empty_cache_or_one_with_only_the_configuration_is_no_model(hub: Hub) -> None:
    empty = hub.resolve("owner/good", HF_HUB_OFFLINE="1")
    hub.resolve("owner/good", weights=False)
    for line in (empty, hub.resolve("owner/good", HF_HUB_OFFLINE="1")):
        assert line.startswith("ERROR model owner/good is not in the local cache")


def test_model_that_cannot_be_served_is_refused_before_its_weights_are_read(
    hub: Hub, tmp_path: Path
) -> None:
    refusal = "architecture SurpriseForCausalLM is not supported"
    assert hub.resolve("owner/good", refusal=refusal) == f"ERROR {refusal}"
    assert set(hub.fetched) == {"config.json", "tokenizer.json", "chat_template.jinja"}
    assert hub.resolve("owner/bin", refusal=refusal) == f"ERROR {refusal}"
    (tmp_path / "config.json").write_bytes(FILES["config.json"])
    assert hub.resolve(str(tmp_path), refusal=refusal) == f"ERROR {refusal}"
    assert hub.resolve("owner/good").startswith("PATH ")
    # The start itself checks a model whose weights are in the cache.
    assert hub.resolve("owner/good", refusal=refusal).startswith("PATH ")


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
