"""`python -m minisgl.shell --url URL --model NAME` starts a chat with a running server."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from minisgl.shell.client import ChatClient, ServerError
from minisgl.shell.repl import COMMANDS, Shell


def main(argv: Sequence[str] | None = None) -> int:
    """Wait for the server, then chat. Returns the exit code."""
    parser = argparse.ArgumentParser("minisgl.shell", description=__doc__, allow_abbrev=False)
    url = "http://127.0.0.1:1919"
    parser.add_argument("--url", default=url, help=f"URL of the server. Default: {url}.")
    parser.add_argument("--model", help="Name of a served model. Default: the first one.")
    options = parser.parse_args(argv)
    # Both signals raise exceptions, so that prompt_toolkit restores the mode of the terminal. A
    # process that a script starts in the background ignores SIGINT until it sets a handler.
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        key = os.environ.get("MINISGL_API_KEY", "")
        client = ChatClient(options.url, options.model, key)
        client.wait_ready()
        if not sys.stdin.isatty():
            Shell(client, _read_line, is_terminal=False).run()
            return 0
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter

        commands = WordCompleter(list(COMMANDS), sentence=True)
        session = PromptSession[str](completer=commands, complete_while_typing=False)
        Shell(client, session.prompt).run()
    except ServerError as error:
        sys.stderr.write(f"minisgl shell: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _read_line(prompt: str) -> str:
    """Return a line of piped input. The prompt is not shown."""
    if not (line := sys.stdin.readline()):
        raise EOFError
    return line


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
