"""A server for clients of Responses and Messages: a scripted engine that calls a tool."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minisgl.demo import model_path
from tests.process.harness import ServerProcess, run_server

__all__ = ["ANSWER", "CALL", "answer_of", "run_scripted"]

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
ANSWER = "The sum is 5."
_TEMPLATE = Path(__file__).parents[1] / "unit" / "tool_calls" / "templates" / "hermes.jinja"


@contextlib.contextmanager
def run_scripted(
    folder: Path, rules: list[tuple[str, str]], *flags: str
) -> Iterator[ServerProcess]:
    """A server whose engine answers by `rules`, with a template that renders tools.

    rules: pairs of a text in the prompt and the answer; the first that matches counts.
    """
    shutil.copytree(model_path(), folder / "model")
    shutil.copy(_TEMPLATE, folder / "model" / "chat_template.jinja")
    script = folder / "script.json"
    script.write_text(json.dumps(rules))
    with run_server("--model", str(folder / "model"), *flags, stub=str(script)) as server:
        yield server.wait_ready()


def answer_of(api: Any, stream: bool, **given: Any) -> Any:
    """Ask `responses` or `messages` of a client. stream: the client collects it from a stream."""
    if not stream:
        return api.create(**given)
    with api.stream(**given) as events:
        is_response = hasattr(events, "get_final_response")
        return events.get_final_response() if is_response else events.get_final_message()
