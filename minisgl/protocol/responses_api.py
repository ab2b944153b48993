"""Bodies of OpenAI's Responses API: the request, the whole answer, and the events of a stream."""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from minisgl.protocol import content, requests
from minisgl.protocol.requests import bounds
from minisgl.protocol.responses import ChatTokenLogprob

# The translation refuses other types as features that the server does not have.
_ITEM_TYPES = {"enum": ["message", "function_call", "function_call_output", "reasoning"]}
ItemType = Annotated[str, Meta(extra_json_schema=_ITEM_TYPES)]
Metadata = Annotated[dict[str, str], Meta(max_length=16)]
ToolName = Annotated[str, Meta(max_length=256)]


class ResponsesPart(msgspec.Struct, kw_only=True):
    """One part of an item's content: a type of text, or input_image with a data URL."""

    type: str
    text: str = ""
    image_url: str | None = None
    file_id: str | None = None
    detail: content.Detail = "auto"


Content: TypeAlias = str | list[ResponsesPart] | None


class ResponsesItem(msgspec.Struct, kw_only=True):
    """One item of `input`. Further fields of an earlier answer, such as `status`, are ignored."""

    type: ItemType = "message"
    role: requests.Role | None = None
    content: Content = None
    call_id: str = ""
    name: ToolName = ""
    arguments: str = ""
    output: Content = None
    summary: list[ResponsesPart] = []
    encrypted_content: str | None = None


class ResponsesTool(msgspec.Struct, kw_only=True):
    """A tool. Tools of other types than function are ignored, and so are further fields."""

    type: str
    name: requests.ToolFunctionName = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesToolChoice(msgspec.Struct, kw_only=True):
    """A tool choice other than a mode: one function, or a list of allowed tools with a mode.

    The answer repeats the fields that the client has sent.
    """

    type: str
    name: ToolName | UnsetType = UNSET
    mode: Literal["auto", "required"] | UnsetType = UNSET
    tools: Annotated[list[dict[str, Any]], Meta(max_length=128)] | UnsetType = UNSET


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """text, json_object, or json_schema with its schema."""

    type: str
    name: str = ""
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The form of the text. `verbosity` is ignored."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesReasoning(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`effort` goes to the chat template. With `summary`, the answer has its reasoning there.

    The server makes no summary: it is the whole reasoning. Further fields are ignored.
    """

    effort: Annotated[str, Meta(max_length=32)] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class InputTokensBody(requests.RequestBody, kw_only=True):
    """POST /v1/responses/input_tokens: the parameters that change the prompt, and the session."""

    model: str
    input: str | Annotated[list[ResponsesItem], Meta(min_length=1)]
    instructions: str | None = None
    tools: Annotated[list[ResponsesTool], Meta(max_length=1024)] = []
    tool_choice: requests.ToolMode | ResponsesToolChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig | None = None
    reasoning: ResponsesReasoning | None = None
    prompt_cache_key: str = ""


class ResponsesBody(InputTokensBody, kw_only=True):
    """POST /v1/responses."""

    max_output_tokens: Annotated[int, bounds("max_tokens")] | None = None
    temperature: Annotated[float, bounds("temperature")] | None = None
    top_p: Annotated[float, bounds("top_p")] | None = None
    stream: bool = False
    include: Annotated[list[requests.ShortText], Meta(max_length=32)] = []
    top_logprobs: Annotated[int, bounds("logprobs")] = 0
    metadata: Metadata = {}
    priority: requests.Priority | None = None


ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str
    annotations: tuple[()] = ()
    logprobs: list[ChatTokenLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Text between <think> and </think>."""

    text: str


class SummaryText(msgspec.Struct, kw_only=True, tag_field="type", tag="summary_text"):
    """The reasoning of a request that asked for a summary."""

    text: str


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """Text of the answer."""

    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning of the answer. A client sends it back in `input`.

    It is in `summary` if the request asked for a summary, else in `content`. `encrypted_content`
    has it too if `include` asked for this; the text is encoded, and not encrypted.
    """

    id: str
    status: ItemStatus
    summary: list[SummaryText] = []
    content: list[ReasoningText]
    encrypted_content: str | UnsetType = UNSET


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A tool call. `arguments` is JSON in a string."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem: TypeAlias = OutputMessage | ReasoningItem | FunctionCallItem


class InputDetails(msgspec.Struct):
    """cached_tokens: prompt tokens whose keys and values were in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    """reasoning_tokens: tokens of the reasoning, which output_tokens includes."""

    reasoning_tokens: int


class ResponsesUsage(msgspec.Struct, kw_only=True):
    """Token counts of one request."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct):
    """The error that ended an answer after its first event."""

    code: Literal["server_error"]
    message: str


class IncompleteDetails(msgspec.Struct):
    """Why the answer ended early."""

    reason: Literal["max_output_tokens"]


Status: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed"]


class ModelResponse(msgspec.Struct, kw_only=True):
    """The whole answer. The server stores no answer, so `store` is always false."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem]
    usage: ResponsesUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: ResponsesReasoning
    store: Literal[False] = False
    temperature: float | None
    text: TextConfig
    tool_choice: str | ResponsesToolChoice
    tools: list[ResponsesTool]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"


class ResponsesEvent(msgspec.Struct, kw_only=True):
    """One event of a stream. Its type says which of the optional fields it has."""

    type: str
    sequence_number: int
    response: ModelResponse | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    part: OutputText | ReasoningText | SummaryText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET


class InputTokens(msgspec.Struct, kw_only=True):
    """The number of tokens of a prompt."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
