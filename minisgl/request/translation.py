"""`Translation`: the body of a request as a body of OpenAI's chat or completions."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from minisgl.protocol import requests
from minisgl.protocol.requests import AnyBody
from minisgl.request.paths import SAME_PATHS, Paths

# Parameters with the same name and meaning in a chat and in a body of another API.
_SHARED = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "stream",
    "parallel_tool_calls",
    "priority",
    "prompt_cache_key",
)


class Translation(NamedTuple):
    """The body of a request as a body of OpenAI's chat or completions.

    paths       for error messages: the path in the client's body of each field of `body`.
    shrinks_max_tokens
                max_tokens shrinks to the room in the context. False: a larger number is refused.
    ignored     features of the request that `body` leaves out, as labels of the metric.
    repeated    parameters that the answer repeats.
    include     optional parts of the answer that the client asked for.
    """

    body: AnyBody
    paths: Paths = SAME_PATHS
    shrinks_max_tokens: bool = False
    ignored: tuple[str, ...] = ()
    repeated: dict[str, Any] = {}
    include: tuple[str, ...] = ()


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


def function_paths(chat_list: str, client_list: str, is_function: Iterable[bool]) -> dict[str, str]:
    """Entries of `Paths` for a list of tools. The chat has only its functions.

    chat_list, client_list: the paths of the list. is_function: for each tool of the client.
    """
    kept = [index for index, function in enumerate(is_function) if function]
    return {
        f"{chat_list}[{number}].function": f"{client_list}[{index}]"
        for number, index in enumerate(kept)
    }


def chat_tool(tool: msgspec.Struct) -> requests.Tool:
    """The tool of a chat with the name, the description and the schema of this tool."""
    function = msgspec.convert(tool, requests.FunctionTool, from_attributes=True)
    return requests.Tool(type="function", function=function)
