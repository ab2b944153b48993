"""MINISGL_* variables: known ones, unknown ones, and those that Kubernetes injects."""

import logging

import pytest

from minisgl.core import ConfigError
from minisgl.settings.places import environment_words, flag_variables, is_injected
from minisgl.settings.resolve import resolve, warn_of_unknown


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("true", True), ("0", False), ("", False)]
)
def test_switch_is_parsed(text: str, value: bool) -> None:
    found = resolve([], {"MINISGL_DISABLE_OVERLAP_SCHEDULING": text})
    assert found.scheduler.overlap is not value


def test_bad_value_names_the_variable() -> None:
    """Fault of mini-sglang: it ignored bad values without a message."""
    with pytest.raises(ConfigError, match="MINISGL_DISABLE_OVERLAP_SCHEDULING"):
        resolve([], {"MINISGL_DISABLE_OVERLAP_SCHEDULING": "2"})


@pytest.mark.parametrize("text", ["", " "])
def test_empty_key_is_refused(text: str) -> None:
    """An empty Secret must not open a server that should be closed."""
    with pytest.raises(ConfigError, match="an API key is empty"):
        resolve([], {"MINISGL_API_KEY": text})
    assert resolve([], {}).api_key_hashes == {}


def test_unknown_variable_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_unknown({"MINISGL_DISABLE_OVERLAP": "1"})
    assert "MINISGL_DISABLE_OVERLAP" in caplog.text


@pytest.mark.parametrize(
    "name",
    [
        *("MINISGL_PORT", "MINISGL_PORT_1919_TCP", "MINISGL_SERVICE_HOST", "OTHER"),
        *("MINISGL_HTTP_PORT", "MINISGL_PROBE_PORT", "MINISGL_API_PORT_80_TCP"),
    ],
)
def test_injected_variables_are_ignored_without_a_warning(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_unknown({name: "tcp://10.0.0.1:1919"})
        other = {"MINISGL_API_SERVICE_HOST": "10.0.0.1", "MINISGL_API_PORT_80_TCP_PROTO": "tcp"}
        warn_of_unknown(other)
    assert caplog.text == ""
    assert list(environment_words({name: "tcp://10.0.0.1:1919"})) == []


def test_address_is_a_setting_unless_kubernetes_has_injected_it() -> None:
    assert is_injected("MINISGL_PROBE_PORT", "tcp://10.0.0.1:80")
    assert not is_injected("MINISGL_PROBE_PORT", "1920")
    assert not is_injected("MINISGL_SOME_ENDPOINT", "tcp://*:5557")


def test_each_flag_has_a_variable_that_kubernetes_does_not_inject() -> None:
    variables = flag_variables()
    assert len(variables) > 50
    assert not [name for name in variables if is_injected(name, "")]
    assert variables["MINISGL_HTTP_PORT"][0] == "--port"
    assert variables["MINISGL_KERNEL_CACHE"][0] == "--kernel-cache"


def test_further_names_have_variables_too_and_the_first_name_wins() -> None:
    further = {"MINISGL_MAX_MODEL_LEN": "64"}
    assert resolve([], further).engine.max_seq_len == 64
    assert resolve([], {"MINISGL_MAX_SEQ_LEN_OVERRIDE": "32", **further}).engine.max_seq_len == 32


def test_port_that_kubernetes_has_not_injected_is_named(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_unknown({"MINISGL_PORT": "8000"})
    assert "'MINISGL_HTTP_PORT'" in caplog.text


def test_misspelt_variable_of_a_flag_is_named_with_the_nearest_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_of_unknown({"MINISGL_MAX_RUNNING_REQUEST": "8"})
    assert "did you mean 'MINISGL_MAX_RUNNING_REQUESTS'" in caplog.text
