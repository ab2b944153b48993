"""Flags and environment become one complete configuration."""

import argparse
import re
from pathlib import Path

import pytest

from minisgl.core import ConfigError
from minisgl.demo import model_path
from minisgl.settings import ServerConfig
from minisgl.settings.command_line import build_parser
from minisgl.settings.hub import Check
from minisgl.settings.places import read_flags
from minisgl.settings.resolve import resolve


def config(*flags: str, **environ: str) -> ServerConfig:
    def find(name: str, revision: str | None, weights: bool, check: Check) -> str:
        return f"/models/{name}" if weights else f"/without-weights/{name}"

    return resolve(flags, environ, find_model=find)


def test_without_flags_the_demo_is_served_on_loopback() -> None:
    found = config()
    assert (found.host, found.port) == ("127.0.0.1", 1919)
    assert found.served_names == ("minisgl-demo",)
    assert found.engine.model_path == str(model_path())


def test_flag_names_of_mini_sglang_mean_the_same() -> None:
    found = config(
        *("--model-path", "org/name", "--tp-size", "2", "--max-running-requests", "8"),
        *("--max-seq-len-override", "512", "--memory-ratio", "0.5", "--dummy-weight"),
        *("--graph", "0", "--tokenizer-count", "3", "--max-extend-length", "64"),
        *("--num-pages", "99", "--page-size", "32", "--attn", "torch", "--cache", "naive"),
    )
    engine = found.engine
    assert engine.model_path == "/without-weights/org/name", "random weights need no weights"
    assert (engine.tp_size, engine.max_running_reqs, engine.max_seq_len) == (2, 8, 512)
    assert (engine.memory_ratio, engine.dummy_weight, engine.cuda_graph_max_bs) == (0.5, True, 0)
    assert (engine.num_pages, engine.page_size, engine.attention_backend) == (99, 32, "torch")
    assert (found.scheduler.cache_type, found.scheduler.prefill_budget_tokens) == ("naive", 64)
    assert (found.num_tokenizers, found.served_names) == (3, ("org/name",))


def test_settings_of_an_image_come_from_the_environment() -> None:
    found = config(MINISGL_COMMIT="abc", MINISGL_KERNEL_CACHE="/kernels")
    assert (found.commit, found.engine.kernel_cache) == ("abc", "/kernels")
    assert config("--kernel-cache", "/own", MINISGL_KERNEL_CACHE="/k").engine.kernel_cache == "/own"


def test_local_folder_is_served_by_its_name_alone(tmp_path: Path) -> None:
    """Fault of mini-sglang: it sent the path on the server's disk to every client."""
    assert config("--model", str(tmp_path)).served_names == (tmp_path.name,)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--modle", "x"], "did you mean '--model'"),
        (["--port", "70000"], "at most 65535"),
        (["--max-running-requests", "8193"], "at most 8192"),
        (["--dtype", "float8"], "invalid choice"),
        (["--kv-cache-dtype", "int8"], "invalid choice"),
        (["--memory-ratio", "nan"], "must be a number"),
        (["--max-wait", "inf"], "at most 1e+06"),
        (["--read-timeout", "1e10"], "at most 1e+06"),
        (["--target-step-ms", "inf"], "at most 1e+06"),
        (["--max-slowdown", "101"], "at most 100"),
        (["--mod", "x"], "unknown argument --mod"),
        (["one", "two"], "give one model, not one and two"),
        (["--no-enable-prefix-caching"], "; use --cache-type naive; see"),
        (["--load-format=dummy"], "--load-format; weights are safetensors files"),
        (["-p", "8000"], "unknown argument -p; use --port; see"),
        (["--no-trust-remote-code"], "unknown argument --no-trust-remote-code"),
        (["--max-template-char", "9"], "did you mean '--max-prompt-chars'?"),
        (["one", "--tpp", "2"], "unknown argument --tpp; did you mean '--tp'"),
        (["--model", "one", "two"], "give one model, either two or --model"),
    ],
)
def test_wrong_flag_is_one_line(
    flags: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        config(*flags)
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert expected in error
    assert len(error.strip().splitlines()) == 1


def test_each_float_flag_that_is_no_time_has_a_limit_of_its_own() -> None:
    flags = [flag for section in read_flags().values() for flag in section.values()]
    without = [each for each in flags if each.get("type") == "float" and "high" not in each]
    assert {each["unit"] for each in without} == {"SECONDS", "MS"}


def test_flags_of_earlier_versions_are_obeyed_or_ignored_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    old = ("--max-n", "4", "--max-prompts", "9", "--max-stop-strings", "2")
    assert config(*old).limits.max_choices == 4
    assert config(*old, "--max-choices", "3").limits.max_choices == 3
    for name in old[:3:2]:
        assert f"the flag {name} has been replaced: use --max-choices" in caplog.text
    assert "the flag --max-stop-strings is ignored: the limit is 16" in caplog.text
    assert "--max-n," not in build_parser().format_help()


def test_configuration_is_checked_by_the_caller_before_the_model_is_looked_up() -> None:
    """Regression: a chat with a running server first looked up or downloaded the model."""
    calls: list[str] = []

    def find(name: str, revision: str | None, weights: bool, check: Check) -> str:
        calls.append(name)
        return "/models"

    def before(config: ServerConfig) -> None:
        calls.append(f"check {config.served_names[0]}")

    resolve(["--shell", "-m", "org/name"], {}, find_model=find, before_download=before)
    assert calls == ["check org/name", "org/name"]


def test_wrong_page_size_is_refused_before_the_model_is_looked_up() -> None:
    """Regression: the error came after the download."""

    def find(name: str, revision: str | None, weights: bool, check: Check) -> str:
        pytest.fail(f"{name} was looked up")

    with pytest.raises(ConfigError, match="page_size 12 is not a power of two"):
        resolve(["--page-size", "12", "--model", "Qwen/Qwen3-0.6B"], {}, find_model=find)


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        (
            ("--kv-events-endpoint", "tcp://*:5557", "--cache-type", "naive"),
            "remove one of the two",
        ),
        (("--cache-isolation", "key"), "set --api-key-file, or remove --cache-isolation"),
        (("--allow-origin", "chat.example.com"), "set SCHEME://HOST, such as https://example.com"),
        (("--allow-origin", "*", "https://a.example/"), "'https://a.example/' is no origin"),
    ],
)
def test_settings_without_an_effect_are_refused(flags: tuple[str, ...], remedy: str) -> None:
    """The server once accepted them: it published no event, and separated no client."""
    with pytest.raises(ConfigError, match=re.escape(remedy)):
        config(*flags)


def test_settings_with_an_effect_are_accepted() -> None:
    config("--kv-events-endpoint", "tcp://*:5557")
    config("--cache-isolation", "key", "--api-key", "k")
    origins = (
        "*",
        "null",
        "https://a.example",
        "http://127.0.0.1:8080",
        "app://-",
        "http://[::1]:1",
    )
    assert config("--allow-origin", *origins).allowed_origins == origins


def test_certificate_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    """Regression: the API process ended with a traceback that named no file."""
    paths = certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    flags = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    for text in ("", "no PEM"):
        with pytest.raises(ConfigError, match=f"{certificate} and {key} are not a certificate"):
            config(*flags)
        for path in paths:
            path.write_text(text)


def test_environment_can_switch_overlap_off_and_is_checked() -> None:
    assert not config(MINISGL_DISABLE_OVERLAP_SCHEDULING="1").scheduler.overlap
    with pytest.raises(ConfigError, match="MINISGL_DISABLE_OVERLAP_SCHEDULING"):
        config(MINISGL_DISABLE_OVERLAP_SCHEDULING="maybe")


def test_help_groups_the_flags_and_names_units() -> None:
    text = build_parser().format_help()
    for word in ("model:", "scheduling:", "serving:", "limits:", "SECONDS", "TOKENS", "1919"):
        assert word in text
    assert "--max-seq-len-override, --max-model-len, --context-length, --context TOKENS" in text
    assert text.startswith("examples:\n  minisgl ")
    flags = text.split("places of a setting")[0]
    assert not re.search(r"^usage", flags, re.MULTILINE)
    assert set(re.findall(r"--no-\S+", flags)) == {
        "--no-grammars",
        "--no-images",
        "--no-playground",
    }


def test_help_of_each_flag_is_made_of_sentences() -> None:
    for action in build_parser()._actions:
        if action.help is not argparse.SUPPRESS:
            assert re.fullmatch(r"([A-Z]|[a-z]+:|\d).*\.", action.help), action.help


@pytest.mark.parametrize(
    "words",
    [
        ("org/name", "-tp", "2", "--max-model-len", "512", "--gpu-memory-utilization", "0.5"),
        ("--max-num-seqs", "8", "-tp=2", "--max-model-len=512", "org/name"),
        ("-m", "org/name", "--tp", "2", "--context-length", "512", "--mem-fraction-static", "0.5"),
        ("--model-path", "org/name", "--tp-size", "2", "--context-length=512"),
    ],
)
def test_flag_names_of_vllm_and_sglang_mean_the_same(words: tuple[str, ...]) -> None:
    engine = config(*words).engine
    assert engine.model_path == "/models/org/name"
    assert (engine.tp_size, engine.max_seq_len) == (2, 512)
    assert engine.memory_ratio == (0.5 if "0.5" in words else 0.9)


def test_flag_of_another_server_for_what_is_always_on_logs_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config("--trust-remote-code", "--enable-auto-tool-choice")
    assert "the flag --trust-remote-code is ignored: minisgl runs no code" in caplog.text
    assert "the flag --enable-auto-tool-choice is ignored" in caplog.text


def file_with(folder: Path, text: str) -> str:
    path = folder / "server.toml"
    path.write_text(text)
    return str(path)


def test_command_line_wins_over_the_environment_and_the_environment_over_the_file(
    tmp_path: Path,
) -> None:
    path = file_with(tmp_path, 'model = "file"\nport = 1\ntp = 2\nmax_choices = 3\nhost = "h"')
    environ = {"MINISGL_HTTP_PORT": "4", "MINISGL_TENSOR_PARALLEL_SIZE": "5", "MINISGL_HOST": ""}
    found = config("--port", "6", "--config", path, **environ)
    assert (found.port, found.engine.tp_size, found.limits.max_choices) == (6, 5, 3)
    assert (found.engine.model_path, found.host) == ("/models/file", "h")
    assert config("given", "--config", path).engine.model_path == "/models/given"
    assert config(MINISGL_CONFIG=path, MINISGL_MODEL="env").served_names == ("env",)


def test_switches_and_lists_have_every_place_too(tmp_path: Path) -> None:
    path = file_with(tmp_path, 'dummy-weight = true\nserved-model-name = ["a", "b"]')
    found = config("--config", path)
    assert (found.engine.dummy_weight, found.served_names) == (True, ("a", "b"))
    assert not config("--config", path, MINISGL_DUMMY_WEIGHT="0").engine.dummy_weight
    assert not config("--no-dummy-weight", MINISGL_DUMMY_WEIGHT="true").engine.dummy_weight
    assert config(MINISGL_ALLOW_HOST="one, two").allowed_hosts == ("one", "two")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max-runing-requests = 8", "unknown key 'max-runing-requests'; did you mean"),
        ('config = "other.toml"', "unknown key 'config'"),
        ("shell = 1", "shell must be true or false, not '1'"),
        ("port = true", "port must be a text or a number, not 'True'"),
        ("port = [1, 2]", "port must be one value"),
        ("[port]\nhttp = 1", "port must be one value"),
        ("port = ", "of --config cannot be read"),
    ],
)
def test_wrong_file_is_one_line_that_names_the_key(
    tmp_path: Path, text: str, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        config("--config", file_with(tmp_path, text))
    with pytest.raises(ConfigError, match="the file /nowhere of --config cannot be read"):
        config("--config", "/nowhere")


def test_wrong_value_names_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = file_with(tmp_path, "port = 70000")
    with pytest.raises(SystemExit):
        config("--config", path)
    with pytest.raises(SystemExit):
        config(MINISGL_DTYPE="float8")
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"minisgl: error: {path}: port: argument --port: must be an integer")
    assert second.startswith("minisgl: error: MINISGL_DTYPE: argument --dtype: invalid choice")
    with pytest.raises(ConfigError, match="MINISGL_SHELL must be 1 or 0, not 'maybe'"):
        config(MINISGL_SHELL="maybe")
