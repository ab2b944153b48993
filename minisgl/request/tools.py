"""Reads the tools of a chat: the tools for the template, and the options for finding calls."""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from minisgl.core import InvalidRequest, ModelFacts, Unsupported
from minisgl.message.messages import CompileGrammar, ToolOptions
from minisgl.protocol import requests
from minisgl.request.constraints import ConstraintRequest
from minisgl.request.decode import reject
from minisgl.request.paths import Paths
from minisgl.structured.whitespace import whitespace_pattern
from minisgl.tool_calls.grammar import ToolGrammar
from minisgl.tool_calls.schema import parameter_types

# A model with one of these formats uses it in all answers, also in chats without tools.
ANSWER_FORMATS = ("atem", "harmony")
# The formats whose parsers need the types of parameters, because the answers have raw texts.
TYPED_FORMATS = ("atem", "glm", "minimax", "qwen3-coder")
# By format: the recipients of messages that are no calls. No tool may have such a name.
_RESERVED_NAMES = {"atem": ("self", "user")}
_ID_CHARS = 9
_ANY_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}  # of the schema {}
# The arguments of a tool without `parameters` are an empty object.
_NO_PARAMETERS: dict[str, Any] = {**_ANY_PARAMETERS, "additionalProperties": False}


class ToolRequest(NamedTuple):
    """The tools of one request, and the format of its answer.

    tools     the tools that the model may call. Empty only for a model of ANSWER_FORMATS.
    must_call the answer has at least one call and no other text.
    is_named  the request names one tool, and the answer is exactly one call of this tool.
    parallel  the answer may have more than one call.
    """

    tools: Sequence[requests.FunctionTool]
    must_call: bool
    is_named: bool
    parallel: bool
    format: str

    @property
    def has_sections(self) -> bool:
        """The answer consists of sections, such as reasoning and a final message."""
        return self.format in ANSWER_FORMATS

    @property
    def rendered(self) -> bytes:
        """The tools as JSON for the chat template, in the form that templates expect."""
        if not self.tools:
            return b"null"
        functions = [msgspec.structs.replace(tool, strict=None) for tool in self.tools]
        if self.has_sections:  # Their templates refuse a tool without a description.
            for function in functions:
                function.description = function.description or ""
        return msgspec.json.encode([{"type": "function", "function": f} for f in functions])

    @property
    def options(self) -> ToolOptions:
        """The options with which the detokenizer finds the calls."""
        parameters = {tool.name: tool.parameters for tool in self.tools}
        if self.format not in TYPED_FORMATS:
            parameters = dict.fromkeys(parameters)
        return ToolOptions(format=self.format, parameters=parameter_types(parameters))

    def constraint(
        self, text_constraint: ConstraintRequest | None, max_whitespace: int
    ) -> ConstraintRequest | None:
        """The constraint of an answer with these tools; None if the answer is free.

        text_constraint: the constraint of an answer without calls. max_whitespace: as in
        `constraint_of`.
        A constrained call follows the schema of its tool, also if `strict` is false.
        """
        is_free = not self.must_call and self.parallel and text_constraint is None
        if is_free and not any(tool.strict for tool in self.tools):
            return None
        answer, pattern = None, whitespace_pattern(max_whitespace)
        if text_constraint is not None:
            param, given = text_constraint
            if given.kind not in ("json_schema", "json_object"):
                if self.tools:
                    raise reject(param, "cannot be combined with tools; use a JSON schema")
                raise Unsupported(
                    f"{param}: an answer of this model has several parts ({self.format}), and only "
                    "a JSON schema can constrain the final one",
                    param=param,
                )
            answer, pattern = msgspec.json.decode(given.text), given.whitespace_pattern
        grammar = ToolGrammar(
            format=self.format,
            tools=[(tool.name, tool.parameters or _ANY_PARAMETERS) for tool in self.tools],
            must_call=self.must_call,
            parallel=self.parallel and not self.is_named,
            answer=answer,
        )
        source = msgspec.json.encode(grammar).decode()
        message = CompileGrammar(kind="tool_calls", text=source, whitespace_pattern=pattern)
        param = text_constraint.param if text_constraint and not self.tools else "tools"
        return ConstraintRequest(param, message)


def tools_of(body: requests.AnyBody, facts: ModelFacts, paths: Paths) -> ToolRequest | None:
    """The tools that the answer to this body may call; None if the answer is plain text.

    Raises InvalidRequest, or Unsupported if the template renders no tools or the call format is
    unknown.
    """
    if not isinstance(body, requests.ChatBody):
        return None
    names = [tool.function.name for tool in body.tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            param = paths[f"tools[{index}].function.name"]
            raise reject(param, "must differ from the other names")
    named, mode, allowed = _read_choice(body.tool_choice, names, paths)
    tools = [tool.function for tool in body.tools if tool.function.name in allowed]
    if mode == "required" and not tools:
        rule = "requires a call, but it allows no function of tools: add one"
        raise reject(paths["tool_choice"], rule)
    if not tools or mode == "none":
        has_format = facts.tool_format in ANSWER_FORMATS
        return ToolRequest([], False, False, True, facts.tool_format) if has_format else None
    if facts.tool_format in (ModelFacts.NO_TOOLS, ModelFacts.UNKNOWN_TOOL_FORMAT):
        raise Unsupported(_UNSUPPORTED[facts.tool_format], param=paths["tools"])
    for name in _RESERVED_NAMES.get(facts.tool_format, ()):
        if name in allowed:
            param = paths[f"tools[{names.index(name)}].function.name"]
            raise reject(param, f"must not be {name!r}, which is no tool in answers of this model")
    for tool in tools:
        if tool.parameters is None:
            tool.parameters = _NO_PARAMETERS
        tool.parameters = tool.parameters or _ANY_PARAMETERS
    return ToolRequest(
        tools, mode == "required", named is not None, body.parallel_tool_calls, facts.tool_format
    )


def shorten_ids(messages: Sequence[requests.Message]) -> None:
    """Replace ids of tool calls: Mistral's templates accept only ids of 9 letters and digits."""
    for message in messages:
        for call in message.tool_calls or ():
            call.id = _short_id(call.id)
        if message.tool_call_id is not None:
            message.tool_call_id = _short_id(message.tool_call_id)


def _short_id(identity: str) -> str:
    if len(identity) == _ID_CHARS and identity.isalnum():
        return identity
    return hashlib.sha256(identity.encode()).hexdigest()[:_ID_CHARS]


_UNSUPPORTED = {
    ModelFacts.NO_TOOLS: "the chat template of this model does not describe tools to the model; "
    "send the request without tools, or serve a model that was trained to call tools",
    ModelFacts.UNKNOWN_TOOL_FORMAT: "minisgl does not know the format in which this model writes "
    "tool calls; see --tool-format for the known formats",
}


def _read_choice(
    choice: requests.ToolChoice | str | None, names: Sequence[str], paths: Paths
) -> tuple[str | None, str, Sequence[str]]:
    """The name of the tool to call (or None), the mode, and the names of the allowed tools."""
    if not isinstance(choice, requests.ToolChoice):
        return None, choice or "auto", names
    given = choice.function if choice.type == "function" else choice.allowed_tools
    if given is None:
        param = paths[f"tool_choice.{choice.type}"]
        raise reject(param, f"is required with type {choice.type}")
    if isinstance(given, requests.FunctionName):
        _check_known(given.name, names, paths["tool_choice.function.name"])
        return given.name, "required", [given.name]
    allowed = [tool.function.name for tool in given.tools]
    for index, name in enumerate(allowed):
        param = paths[f"tool_choice.allowed_tools.tools[{index}].function.name"]
        _check_known(name, names, param)
    return None, given.mode, allowed


def _check_known(name: str, names: Sequence[str], param: str) -> None:
    if name not in names:
        raise InvalidRequest(f"{param}: tools has no function '{name[:64]}'", param=param)
