"""The shell in a pseudo-terminal, with real keys and a real server."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.patience import patience
from tests.process.harness import ServerProcess, wait_for

pytestmark = pytest.mark.process

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]")


class Terminal:
    """A process on a pseudo-terminal: `type` keys, `expect` output."""

    def __init__(self, command: list[str]) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: _own_terminal(slave),
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(slave)
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, text: str) -> str:
        """Wait for `text` in the output, and consume and return the output up to it."""
        end = time.monotonic() + patience()
        while text not in self._seen:
            assert time.monotonic() < end, f"no {text!r} in {self._seen!r}"
            if select.select([self._master], [], [], 0.1)[0]:
                data = os.read(self._master, 65536).decode(errors="replace")
                if "\x1b[6n" in data:  # prompt_toolkit asks where the cursor is
                    os.write(self._master, b"\x1b[1;1R")
                self._seen += _ESCAPES.sub("", data)
        before, _, self._seen = self._seen.partition(text)
        return before + text

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)


def _own_terminal(slave: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal(stub_server: ServerProcess) -> Iterator[Terminal]:
    command = [sys.executable, "-m", "minisgl.shell", "--url", stub_server.url, "--model", "tiny"]
    found = Terminal(command)
    found.expect("/help lists the commands")
    yield found
    found.close()


def test_answer_streams_and_the_conversation_goes_on(terminal: Terminal) -> None:
    terminal.type("hello there\r")
    terminal.expect("hello there")
    terminal.expect("assistant")  # the stub repeats the rendered prompt, which ends so
    terminal.type("\x03")
    terminal.expect("(stopped)")
    terminal.type("/history\r")
    terminal.expect("user: hello there")
    terminal.type("/reset\r")
    terminal.expect("(conversation forgotten)")
    terminal.type("/history\r")
    assert "user:" not in terminal.expect("/history")
    terminal.type("/exit\r")
    assert terminal.process.wait(patience()) == 0


def test_unknown_command_is_a_message(terminal: Terminal) -> None:
    """mini-sglang's shell raised ValueError, which ended the whole server."""
    terminal.type("/exitt\r")
    terminal.expect("unknown command /exitt; did you mean '/exit'?")
    terminal.type("/help\r")
    terminal.expect("/reset")


def test_ctrl_c_at_the_prompt_stays_and_ctrl_d_leaves(terminal: Terminal) -> None:
    terminal.expect(">")
    terminal.type("\x03")
    terminal.expect("(Ctrl-D or /exit leaves)")
    terminal.expect(">")
    terminal.type("\x04")
    assert terminal.process.wait(patience()) == 0


@pytest.mark.parametrize(
    "flags",
    [pytest.param((), marks=pytest.mark.proof), ("--api-key", "sesame", "--host", "0.0.0.0")],
)
def test_shell_flag_serves_and_ends_with_the_shell(
    tiny_model: Path, flags: tuple[str, ...]
) -> None:
    command = [sys.executable, "-m", "tests.process.stub_server", "echo", "--shell", *flags]
    terminal = Terminal([*command, "--model", str(tiny_model), "--port", "0"])
    try:
        told = terminal.expect("/help lists the commands")
        (url,) = re.findall(r"listening on (http://[0-9.]+:[0-9]+)", told)
        assert ("//0.0.0.0:" in url) == bool(flags), "the address that was asked for"
        status = httpx.get(url + "/v1/models", timeout=patience()).status_code
        assert status == (401 if flags else 200), "the key of the shell is its own"
        terminal.type("hi\r")
        terminal.expect("assistant")
        terminal.type("\x03")
        terminal.expect("(stopped)")
        assert terminal.process.poll() is None, "Ctrl-C stops the answer and not the server"
        terminal.type("/exit\r")
        wait_for(lambda: terminal.process.poll() is not None, "the end of the server")
        assert terminal.process.returncode == 0
    finally:
        terminal.close()


def test_shell_without_a_server_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "minisgl.shell", "--url", "http://127.0.0.1:9"],
        capture_output=True,
        text=True,
        timeout=patience(),
    )
    assert done.returncode == 1
    assert "cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr
