"""Keys stay in the launcher, and messages of other processes have no effect."""

import contextlib
import logging
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
import zmq

from minisgl.core import FinishReason
from minisgl.message.messages import (
    AbortReq,
    Finished,
    PrefillDone,
    Ready,
    Shutdown,
    StepOutput,
    StepText,
    TextUpdate,
    TokenizeResult,
    TokenizeText,
    WireMessage,
)
from tests.patience import patience
from tests.process.harness import ServerProcess, run_server, wait_for

pytestmark = pytest.mark.process

CHILDREN = ("api", "tokenizer-0", "detokenizer", "grammars", "scheduler")


def test_keys_are_in_no_child(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: every child had the keys in its environment.

    The start is fresh, because /proc shows the environment of the fork server for each fork.
    """
    monkeypatch.setenv("MINISGL_API_KEY", "sesame-of-the-environment")
    monkeypatch.setenv("MINISGL_ADMIN_API_KEY", "root-of-the-environment")
    flags = ("--api-key", "sesame-of-the-flag", "--num-pages", "64")
    with run_server("--model", str(tiny_model), *flags, fresh=True) as server:
        server.wait_ready()
        for name in CHILDREN:
            child = psutil.Process(server.child_pid(name))
            assert "MINISGL_API_KEY" not in child.environ()
            shown = "\0".join([*child.environ().values(), *child.cmdline()])
            assert "sesame" not in shown
            assert "root-of" not in shown
        for key in ("sesame-of-the-environment", "sesame-of-the-flag", "root-of-the-environment"):
            headers = {"authorization": f"Bearer {key}"}
            url = server.url + "/v1/models"
            assert httpx.get(url, headers=headers, timeout=patience()).status_code == 200
        warnings = [line for line in server.stderr.splitlines() if "--api-key-file" in line]
        assert len(warnings) == 1
        assert "WARNING" in warnings[0]
        assert "sesame" not in server.stderr


def test_foreign_messages_on_the_private_sockets_change_nothing(stub_server: ServerProcess) -> None:
    """Each of them is well-formed. Regression: each of the first four ended or hung the service."""
    opened = PrefillDone(uid=99, prompt_tokens=1, cached_tokens=0)
    ended = Finished(uid=99, reason=FinishReason.LENGTH)
    foreign: list[tuple[str, WireMessage]] = [
        ("api", TokenizeResult(uid=10**6)),
        ("scheduler", Shutdown()),
        ("detokenizer", StepOutput(step_id=1, prefill_done=[opened], finished=[ended])),
        ("api", Ready(role="scheduler")),
        ("api", StepText(updates=[TextUpdate(uid=1, finish=FinishReason.STOP)])),
        ("tokenizer-0", TokenizeText(uid=5, text="hello")),
        ("scheduler", AbortReq(uid=1)),
    ]
    before = stub_server.stderr.count("foreign message dropped")
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        for name, message in foreign:
            sender = stack.enter_context(context.socket(zmq.PUSH))
            sender.connect(f"ipc://{stub_server.socket_folder()}/{name}")
            sender.send(msgspec.msgpack.encode(message))

        def dropped() -> bool:
            count = stub_server.stderr.count("foreign message dropped")
            return count == before + len(foreign)

        wait_for(dropped, lambda: f"the refusals: {stub_server.stderr}")
    client = stub_server.client()
    answer = client.completions.create(model="tiny", prompt="one two three", max_tokens=3)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert stub_server.status("/livez") == 200


@pytest.mark.parametrize("flag", ["--api-key", "--admin-api-key"])
def test_key_on_the_command_line_is_a_warning_that_names_the_file(
    flag: str, caplog: pytest.LogCaptureFixture
) -> None:
    from minisgl.settings.resolve import resolve

    with caplog.at_level(logging.WARNING):
        resolve([flag, "secret"], {})
    assert f"use {flag}-file" in caplog.text
    assert "secret" not in caplog.text


def test_web_page_cannot_drive_a_server_of_this_machine(stub_server: ServerProcess) -> None:
    """By DNS rebinding, by a cross-origin call, or by a simple request without a JSON type."""
    url = stub_server.url + "/v1/completions"
    body = b'{"model": "tiny", "prompt": "a", "max_tokens": 1}'
    headers = {"content-type": "application/json"}
    cases = [
        ({}, 200),
        ({"host": "evil.example:1919"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"content-type": "text/plain"}, 415),
    ]
    for more, status in cases:
        answer = httpx.post(url, content=body, headers={**headers, **more}, timeout=patience())
        assert answer.status_code == status, answer.text
