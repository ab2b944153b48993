"""`Translation`: the body of a request as a body of OpenAI's chat or completions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from minisgl.server.protocol import requests
from minisgl.server.protocol.requests import AnyBody

# Parameters with the same name and meaning in a chat and in a body of another API.
_SHARED = ("model", "temperature", "top_p", "top_k", "stream", "parallel_tool_calls", "priority")


class Translation(NamedTuple):
    """The body of a request as a body of OpenAI's chat or completions.

    messages    the parameter of the request with the messages of a chat, for error messages.
    max_tokens  the parameter of the request with the number of tokens, for the error if the context
                has no room for them. None: no error, the number shrinks to the room.
    ignored     features of the request that `body` leaves out, as labels of the metric.
    repeated    parameters that the answer repeats.
    options     values for the chat template. The key has all names that templates use for the
                variable.
    """

    body: AnyBody
    messages: str = "messages"
    max_tokens: str | None = "max_tokens"
    ignored: tuple[str, ...] = ()
    repeated: dict[str, Any] = {}
    options: Mapping[tuple[str, ...], Any] = {}


@dataclass(eq=False, slots=True)
class Turn:
    """The parts of one message of a chat. Their texts are joined once, at the end."""

    role: requests.Role
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[requests.ToolCall] = field(default_factory=list)
    call_id: str | None = None

    def message(self, separator: str = "\n") -> requests.Message:
        return requests.Message(
            role=self.role,
            content=separator.join(self.texts),
            reasoning_content="\n".join(self.reasoning) or None,
            tool_calls=self.calls or None,
            tool_call_id=self.call_id,
        )


def shared_parameters(body: requests.RequestBody) -> dict[str, Any]:
    """The parameters of this body that a chat has under the same name."""
    return {name: getattr(body, name) for name in _SHARED if name in body.__struct_fields__}


def chat_tool(tool: msgspec.Struct) -> requests.Tool:
    """The tool of a chat with the name, the description and the schema of this tool."""
    function = msgspec.convert(tool, requests.FunctionTool, from_attributes=True)
    return requests.Tool(type="function", function=function)
