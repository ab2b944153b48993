"""Bodies of Anthropic's Messages API: requests, the whole answer, events of a stream, errors."""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from minisgl.protocol.requests import RequestBody, StopString, Thinking, ToolFunctionName, bounds

# The translation refuses a type in a place where it is not allowed.
BlockType = Literal[
    "text", "image", "document", "thinking", "redacted_thinking", "tool_use", "tool_result"
]
ToolName = Annotated[str, Meta(max_length=256)]


class CacheControl(msgspec.Struct, kw_only=True):
    """A breakpoint: the prompt up to here is to be cached. Further fields are ignored.

    The server caches every prompt. A breakpoint only changes the token counts of the answer.
    """

    ttl: Literal["5m", "1h"] = "5m"


class MessagesSource(msgspec.Struct, kw_only=True):
    """The source of an image. Only base64 is supported; the server fetches no url and no file."""

    type: str = ""
    media_type: str = ""
    data: str = ""
    url: str = ""


class MessagesBlock(msgspec.Struct, kw_only=True):
    """One block of a message or of a tool's result. Further fields are ignored."""

    type: BlockType
    text: str = ""
    source: MessagesSource | None = None
    thinking: str = ""
    id: str = ""
    name: ToolName = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: "str | list[MessagesBlock] | None" = None
    cache_control: CacheControl | None = None


class MessagesMessage(msgspec.Struct, kw_only=True):
    """One message of `messages`."""

    role: Literal["user", "assistant", "system"]
    content: str | list[MessagesBlock]


class MessagesTool(msgspec.Struct, kw_only=True):
    """A tool. Tools of other types than custom are ignored, and so are further fields."""

    name: ToolFunctionName
    type: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = msgspec.field(default=None, name="input_schema")
    strict: bool | None = None
    cache_control: CacheControl | None = None


class MessagesToolChoice(msgspec.Struct, kw_only=True):
    """Which tools the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName = ""
    disable_parallel_tool_use: bool = False


class SchemaFormat(msgspec.Struct, kw_only=True):
    """The JSON schema that the text of the answer follows."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """The form of the answer. `effort` goes to the chat template."""

    format: SchemaFormat | None = None
    effort: Annotated[str, Meta(max_length=32)] | None = None


class CountTokensBody(RequestBody, kw_only=True):
    """POST /v1/messages/count_tokens: the parameters that change the prompt."""

    model: str
    messages: Annotated[list[MessagesMessage], Meta(min_length=1)]
    system: str | list[MessagesBlock] | None = None
    tools: Annotated[list[MessagesTool], Meta(max_length=1024)] = []
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class MessagesBody(CountTokensBody, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Annotated[int, bounds("max_tokens")]
    temperature: Annotated[float, bounds("temperature")] | None = None
    top_p: Annotated[float, bounds("top_p")] | None = None
    top_k: Annotated[int, bounds("top_k")] | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] = []
    stream: bool = False


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """Text of the answer."""

    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """Text between <think> and </think>. The server does not sign it."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A tool call."""

    id: str
    name: str
    input: dict[str, Any]


AnswerBlock: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock
StopName: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class CacheCreation(msgspec.Struct, kw_only=True):
    """The parts of cache_creation_input_tokens by the time to live of the breakpoint."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessagesUsage(msgspec.Struct, kw_only=True):
    """Token counts. The first, the second and the fourth are together the prompt.

    cache_creation_input_tokens: before the last breakpoint, and not in the cache before.
    cache_read_input_tokens: those that were in the cache.
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_creation: CacheCreation
    cache_read_input_tokens: int
    output_tokens: int


class ModelMessage(msgspec.Struct, kw_only=True):
    """The whole answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopName | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


class ModelInfo(msgspec.Struct, kw_only=True):
    """A served model name. created_at is the start of the server."""

    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None
    max_tokens: int | None


class ModelPage(msgspec.Struct, kw_only=True):
    """All served model names."""

    data: list[ModelInfo]
    first_id: str
    last_id: str
    has_more: Literal[False] = False


class TokenCount(msgspec.Struct):
    """The number of tokens of a prompt."""

    input_tokens: int


class MessagesDelta(msgspec.Struct, kw_only=True):
    """New text of a block, with its type: text_delta, thinking_delta or input_json_delta.

    The delta of message_delta has no type. It holds the reason of the end of the answer.
    """

    type: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: StopName | UnsetType = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessagesEvent(msgspec.Struct, kw_only=True):
    """One event of a stream. Its type says which of the optional fields it has."""

    type: str
    message: ModelMessage | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: AnswerBlock | UnsetType = UNSET
    delta: MessagesDelta | UnsetType = UNSET
    usage: MessagesUsage | UnsetType = UNSET


class UnsupportedFeature(msgspec.Struct, kw_only=True):
    """A feature without which the client can send the request again, as Anthropic's SDKs do."""

    error_code: Literal["thread_unsupported_request"] = "thread_unsupported_request"
    unsupported: tuple[str, ...]


class MessagesErrorDetail(msgspec.Struct):
    """An error. The message names the field at fault."""

    type: str
    message: str
    details: UnsupportedFeature | UnsetType = UNSET


class MessagesError(msgspec.Struct, kw_only=True):
    """The body of every answer with a status of 400 or more, and the last event of a failure."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail
