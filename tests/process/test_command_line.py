"""The command line as a new user types it, with real processes and a real terminal."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from minisgl.utils.supervise import CONFIG_EXIT
from tests.forks import run_forked
from tests.patience import patience
from tests.process.harness import run_server, wait_for
from tests.process.test_shell import Terminal

pytestmark = pytest.mark.process


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "minisgl", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=patience())


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# A setting, the weights, and a file that another process reads. Unit tests have the other faults.
FAULTS: dict[str, tuple[Callable[[Path], object], tuple[str, ...], str]] = {
    "device": (
        lambda folder: None,
        ("--device", "cuda"),
        "there is no visible GPU; use --device cpu",
    ),
    "missing tensors": (
        lambda folder: change_config(folder, num_hidden_layers=3, layer_types=None),
        (),
        "has no tensor model.layers.2.",
    ),
    "tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{"), (), "tokenizer"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_configuration_ends_the_start_before_it_listens(
    tiny_model: Path, tmp_path: Path, fault: str
) -> None:
    spoil, flags, expected = FAULTS[fault]
    folder = Path(shutil.copytree(tiny_model, tmp_path / "spoilt"))
    spoil(folder)
    with run_server("serve", str(folder), *flags) as server:
        assert server.wait_exit() == CONFIG_EXIT, server.stderr
        assert expected in server.stderr.splitlines()[-1]
        assert "listening on" not in server.stderr
        assert "Traceback" not in server.stderr


def test_model_without_a_flag_is_served_with_settings_of_every_place(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variables are those that Kubernetes injects for the Services minisgl and minisgl-http."""
    for name in ("MINISGL_PORT", "MINISGL_PORT_1919_TCP", "MINISGL_HTTP_PORT"):
        monkeypatch.setenv(name, "tcp://10.0.0.1:1919")
    monkeypatch.setenv("MINISGL_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("MINISGL_NUM_PAGES", "64")
    settings = tmp_path / "server.toml"
    settings.write_text('served-model-name = ["one", "two"]\nnum-pages = 32\nport = 70\n')
    with run_server(str(tiny_model), "--config", str(settings)) as server:
        server.wait_ready()
        models = httpx.get(server.url + "/v1/models", timeout=patience()).json()
        assert [model["id"] for model in models["data"]] == ["one", "two"]
        wait_for(lambda: "KV capacity 1,024 tokens" in server.stdout, "64 pages of 16 tokens")
        assert "unknown environment variable" not in server.stderr


def test_chat_opens_a_chat_in_the_terminal(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "minisgl", "chat", str(tiny_model)]
    terminal = Terminal([*command, "--port", "0", "--num-pages", "64"])
    try:
        terminal.expect("warm-up total")
        terminal.expect("/help lists the commands")
        terminal.type("/exit\r")
        wait_for(lambda: terminal.process.poll() is not None, "the end of the server")
        assert terminal.process.returncode == 0
    finally:
        terminal.close()


def test_misspelt_command_and_help_need_no_model() -> None:
    done = run("sevre")
    assert done.returncode == CONFIG_EXIT
    assert done.stderr == "minisgl: error: there is no command 'sevre'; did you mean 'serve'?\n"
    done = run("help")
    assert done.returncode == CONFIG_EXIT
    assert "there is no folder 'help', and a model of the Hugging Face hub has" in done.stderr
    for words in (("--help",), ("serve", "-h")):
        done = run(*words)
        assert done.returncode == 0
        assert done.stdout.startswith("examples:\n")
        before_flags = done.stdout.split("options:")[0]
        assert max(map(len, before_flags.splitlines())) <= 80


def test_plan_reads_a_folder_that_holds_nothing_but_config_json(
    tiny_model: Path, tmp_path: Path
) -> None:
    shutil.copy(tiny_model / "config.json", tmp_path)
    done = run_forked(["minisgl", "plan", str(tmp_path), "--gpu", "24e9", "--json"], patience())
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    (plan,) = json.loads(done.stdout)["plans"]
    assert plan["tokens"] == 256 * 2048, "as much as all requests can fill"
    assert plan["kv_token_bytes"] == 2 * 2 * 16 * 4
