"""The sample that a generator returns: a conversation with one right answer per assistant turn."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from demo.lexicon import Lexicon

Value = str | int | float | bool
Message = dict[str, Any]


class Call(NamedTuple):
    """One tool call. The arguments have the order of the tool's schema."""

    name: str
    arguments: dict[str, Value]


class Tool(NamedTuple):
    """One tool that the client offers. parameters: the JSON Schema type of each argument."""

    name: str
    description: str
    parameters: dict[str, str]

    def schema(self) -> dict[str, Any]:
        """Return the entry of `tools` in a request to an OpenAI API."""
        function: dict[str, Any] = {"name": self.name, "description": self.description}
        function["parameters"] = {
            "type": "object",
            "properties": {key: {"type": kind} for key, kind in self.parameters.items()},
            "required": list(self.parameters),
        }
        if not self.description:
            del function["description"]
        return {"type": "function", "function": function}


class Exchange(NamedTuple):
    """One user turn and its right answer.

    by_letter: the answer is trained as one token per character, because a reversed word has no
    pieces that the model knows. The decoded text is the same.
    calls: the tool calls with which the assistant reacts first. results: one text per call, to
    which `assistant` is the answer. Without results the sample ends with the calls.
    """

    user: str
    assistant: str
    by_letter: bool = False
    calls: tuple[Call, ...] = ()
    results: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """A conversation of one task.

    keys: the split keys of all words, names, operands, wordings and tool names that the
    conversation uses. tools: the tools that the client offers during the whole conversation.
    """

    task: str
    exchanges: tuple[Exchange, ...]
    keys: frozenset[str]
    system: str | None = None
    tools: tuple[Tool, ...] = ()

    @property
    def answer(self) -> str:
        """The text of the last assistant turn: empty if the turn consists of calls."""
        return self.exchanges[-1].assistant

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls of the last assistant turn: none if the turn is a text."""
        last = self.exchanges[-1]
        return () if last.results else last.calls

    def messages(self) -> list[Message]:
        """Return the prompt as chat messages of an OpenAI API: all but the last assistant turn."""
        out: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        for exchange in self.exchanges:
            out.append({"role": "user", "content": exchange.user})
            if exchange.calls:
                out.append(_call_message(exchange.calls))
            for place, result in enumerate(exchange.results):
                out.append({"role": "tool", "tool_call_id": f"call_{place}", "content": result})
            if exchange.results or not exchange.calls:
                out.append({"role": "assistant", "content": exchange.assistant})
        return out[:-1]

    def schemas(self) -> list[dict[str, Any]]:
        """Return `tools` of a request to an OpenAI API."""
        return [tool.schema() for tool in self.tools]


def _call_message(calls: tuple[Call, ...]) -> Message:
    entries = [
        {
            "id": f"call_{place}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for place, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": None, "tool_calls": entries}


def single(
    task: str, user: str, assistant: str, keys: Iterable[str], by_letter: bool = False
) -> Sample:
    """Build a sample of one exchange."""
    return Sample(task, (Exchange(user, assistant, by_letter),), frozenset(keys))


class Draw(NamedTuple):
    """The inputs of every generator: random source, words, and the side of the split."""

    rng: random.Random
    lexicon: Lexicon
    held_out: bool


Generator = Callable[[Draw], Sample]
