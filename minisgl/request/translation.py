"""`Translation`: the body of a request as a body of OpenAI's chat or completions."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from minisgl.protocol import content, requests
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


class Breakpoints(NamedTuple):
    """The times to live of the breakpoints of a request, "5m" or "1h"; "": it has none there.

    end: at the end of the last message. inside: before that; "1h" if one of them has it.
    """

    inside: str = ""
    end: str = ""

    def places(self, prefixes: tuple[int, int], page_size: int) -> tuple[int, int]:
        """The numbers of prompt tokens before the last breakpoint, and before the last of "1h".

        prefixes: as in AddReq. Each number is of whole pages, because only these are cached. The
        breakpoints inside count as one at the end of the system message, if this has 2,048
        characters, and else not at all: the places of the others in the prompt are not known.
        """
        stable, first = prefixes
        ends = [(first, self.inside), (stable, self.end)]
        last = max((tokens for tokens, ttl in ends if ttl), default=0)
        of_hour = max((tokens for tokens, ttl in ends if ttl == "1h"), default=0)
        return last // page_size * page_size, of_hour // page_size * page_size


class Translation(NamedTuple):
    """The body of a request as a body of OpenAI's chat or completions.

    paths       for error messages: the path in the client's body of each field of `body`.
    shrinks_max_tokens
                max_tokens shrinks to the room in the context. False: a larger number is refused.
    ignored     features of the request that `body` leaves out, as labels of the metric.
    repeated    parameters that the answer repeats.
    include     optional parts of the answer that the client asked for.
    breakpoints for the token counts of the answer.
    """

    body: AnyBody
    paths: Paths = SAME_PATHS
    shrinks_max_tokens: bool = False
    ignored: tuple[str, ...] = ()
    repeated: dict[str, Any] = {}
    include: tuple[str, ...] = ()
    breakpoints: Breakpoints = Breakpoints()


@dataclass(eq=False, slots=True)
class Turn:
    """The parts of one message of a chat.

    Its texts are joined once, at the end. With an image, they stay parts.
    """

    role: requests.Role
    parts: list[str | content.ImagePart] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[requests.ToolCall] = field(default_factory=list)
    call_id: str | None = None

    def message(self, separator: str = "\n") -> requests.Message:
        texts = [part for part in self.parts if isinstance(part, str)]
        parts: list[content.Part] = [
            content.TextPart(text=part) if isinstance(part, str) else part for part in self.parts
        ]
        return requests.Message(
            role=self.role,
            content=separator.join(texts) if len(texts) == len(parts) else parts,
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
