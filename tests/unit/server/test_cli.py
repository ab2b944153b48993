"""Flags and environment become one complete configuration."""

from pathlib import Path

import pytest

from minisgl.core import ConfigError
from minisgl.server import ServerConfig
from minisgl.server.cli import build_parser, resolve


def config(*flags: str, **environ: str) -> ServerConfig:
    def find(name: str, revision: str | None, weights: bool) -> str:
        return f"/models/{name}" if weights else f"/without-weights/{name}"

    return resolve(flags, environ, find, lambda: Path("/demo"))


def test_without_flags_the_demo_is_served_on_loopback() -> None:
    found = config()
    assert (found.host, found.port) == ("127.0.0.1", 1919)
    assert found.served_names == ("minisgl-demo",)
    assert found.engine.model_path == "/demo"


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
        (["--mod", "x"], "unknown argument --mod"),
        (["extra"], "unknown argument extra"),
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


def test_flags_of_earlier_versions_are_obeyed_or_ignored_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    old = ("--max-n", "4", "--max-prompts", "9", "--max-stop-strings", "2")
    assert config(*old).limits.max_choices == 4
    assert config(*old, "--max-choices", "3").limits.max_choices == 3
    for name in old[::2]:
        assert f"the flag {name} has been replaced" in caplog.text
    assert "--max-n" not in build_parser().format_help()


def test_page_size_is_a_power_of_two() -> None:
    with pytest.raises(ConfigError, match="page_size 12 is not a power of two"):
        config("--page-size", "12")


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
