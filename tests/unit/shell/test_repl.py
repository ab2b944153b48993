"""The conversation, with a scripted user and a scripted server."""

import contextlib
import io
from collections.abc import Generator, Iterator

from minisgl.shell.client import ServerError
from minisgl.shell.repl import Shell


class FakeClient:
    """Answers in two parts, and raises `fault` after the first part."""

    def __init__(self, fault: BaseException | None = None) -> None:
        self.fault = fault
        self.asked: list[list[dict[str, str]]] = []

    def stream(self, messages: list[dict[str, str]]) -> Generator[str, None, None]:
        self.asked.append([dict(message) for message in messages])
        yield "one "
        if self.fault is not None:
            raise self.fault
        yield "two"


def run(client: FakeClient, *lines: str | BaseException) -> str:
    script: Iterator[str | BaseException] = iter(lines)
    output = io.StringIO()

    def prompt(text: str) -> str:
        line = next(script, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    with contextlib.redirect_stdout(output):
        Shell(client, prompt).run()  # type: ignore[arg-type]
    return output.getvalue()


def test_conversation_goes_on_and_reset_forgets_it() -> None:
    client = FakeClient()
    run(client, "a", "b", "/reset", "c", "/exit", "never")
    assert [[m["content"] for m in asked] for asked in client.asked] == [
        ["a"],
        ["a", "one two", "b"],
        ["c"],
    ]


def test_ctrl_c_keeps_the_partial_answer_and_the_shell() -> None:
    client = FakeClient(KeyboardInterrupt())
    output = run(client, "a", "b")
    assert output.count("(stopped)") == 2
    assert client.asked[1][1] == {"role": "assistant", "content": "one "}


def test_server_error_is_a_message() -> None:
    assert "error: busy" in run(FakeClient(ServerError("busy")), "a", "b")


def test_unknown_command_is_a_message() -> None:
    assert "unknown command /foo" in run(FakeClient(), "/foo")
    assert "did you mean '/reset'" in run(FakeClient(), "/rset")
