"""Request bodies.

`decode` removes the null parameters of a body before it fills the struct, so null means absent.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from minisgl.core.sampling import RANGES
from minisgl.protocol.body import RequestBody as RequestBody
from minisgl.protocol.content import Part as Part
from minisgl.protocol.content import TextPart as TextPart

CHAT = "chat"
COMPLETIONS = "completions"
GENERATE = "generate"
RESPONSES = "responses"
MESSAGES = "messages"
COUNT_TOKENS = "count_tokens"
INPUT_TOKENS = "input_tokens"

_INT32 = 2**31 - 1
Priority = Annotated[int, Meta(ge=-_INT32 - 1, le=_INT32)]


class KnownParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters that the server knows and that are not fields of a body; see parameters.toml."""

    ignored: frozenset[str] = frozenset()
    unsupported: dict[str, tuple[Any, ...]] = {}
    refusals: dict[str, str] = {}


class _Parameters(KnownParameters, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """parameters.toml, which explains the fields. apis: by the name of the struct of the body."""

    descriptions: dict[str, dict[str, str]]
    apis: dict[str, KnownParameters]


PARAMETERS = msgspec.toml.decode(
    Path(__file__).with_name("parameters.toml").read_bytes(), type=_Parameters
)


def bounds(name: str) -> Meta:
    """The range of this parameter in core.sampling."""
    low, high = RANGES[name]
    return Meta(gt=low, le=high) if name == "top_p" else Meta(ge=low, le=high)  # top_p > 0


# Types that several parameters share.
TokenId = Annotated[int, Meta(ge=0, le=_INT32)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
Text = Annotated[str, Meta(min_length=1)]
ShortText = Annotated[str, Meta(max_length=64)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
StopStrings = Annotated[list[StopString], Meta(max_length=16)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
_BIAS_KEYS = {"propertyNames": {"pattern": "^[0-9]{1,9}$"}}
LogitBias = Annotated[dict[TokenId, Bias], Meta(extra_json_schema=_BIAS_KEYS)]
Schema = dict[str, Any] | bool | str  # a JSON schema, or its JSON text
Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]
# A client that sends an earlier answer as a message also sends these fields, with an empty value.
Empty = Annotated[str, Meta(max_length=0)] | Annotated[list[Any], Meta(max_length=0)] | None
EMPTY_FIELDS = ("refusal", "annotations", "audio", "function_call")
ToolFunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.:/-]{1,128}$")]
ToolMode = Literal["none", "auto", "required"]
Role = Literal["system", "developer", "user", "assistant", "tool"]


class FunctionCall(msgspec.Struct, kw_only=True):
    """The function of a tool call. `arguments` is JSON in a string."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: str


class ParsedFunctionCall(FunctionCall, kw_only=True):
    """A function call as chat templates expect it: `arguments` is the parsed JSON."""

    arguments: Any


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call of an earlier answer. Further fields, such as `index`, are ignored."""

    id: Annotated[str, Meta(max_length=256)] = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ReasoningDetail(msgspec.Struct, kw_only=True):
    """A part of the reasoning of an earlier answer. Further fields are ignored."""

    type: str = ""
    text: str | None = None
    summary: str | None = None


class Message(RequestBody, kw_only=True, omit_defaults=True):
    """One message of a chat.

    OpenAI's `parse` adds `parsed`, the value of `content` as an object, to its answer, and litellm
    adds `provider_specific_fields`. A client that sends an answer as a message sends them too.
    `reasoning` and the texts in `reasoning_details` stand for `reasoning_content`, if it is absent.
    `cache_control` is ignored.
    """

    role: Role
    content: str | Annotated[list[Part], Meta(max_length=1024)] | UnsetType | None = UNSET
    tool_calls: Annotated[list[ToolCall], Meta(max_length=128)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: Empty = None
    annotations: Empty = None
    audio: Empty = None
    function_call: Empty = None
    reasoning: str | None = None
    reasoning_details: Annotated[list[ReasoningDetail], Meta(max_length=1024)] | None = None
    cache_control: Any = None
    parsed: Any = None
    provider_specific_fields: Any = None


class FunctionTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A function that the model may call. `parameters` is a JSON schema of an object."""

    name: ToolFunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionTool


class FunctionName(msgspec.Struct, kw_only=True):
    """The name of a function of `tools`."""

    name: str


class ToolName(msgspec.Struct, kw_only=True):
    """One function of `tools`."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(msgspec.Struct, kw_only=True):
    """The tools that the model may call. With mode required, it must call one of them."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolName], Meta(min_length=1, max_length=128)]


class ToolChoice(RequestBody, kw_only=True):
    """The function that the model must call, or the functions that it may call."""

    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class TemplateOptions(RequestBody, kw_only=True, omit_defaults=True):
    """Variables of the chat template that a request may set."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    preserve_thinking: bool | None = None
    reasoning_effort: Annotated[str, Meta(max_length=32)] | None = None
    reasoning_strength: Annotated[str, Meta(max_length=32)] | None = None
    thinking_budget: TokenId | None = None
    date_string: ShortText | None = None
    builtin_tools: Annotated[list[ShortText], Meta(max_length=16)] | None = None


class StreamOptions(RequestBody, kw_only=True):
    """`include_usage` adds a last event with the token counts."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class NamedSchema(RequestBody, kw_only=True):
    """A JSON schema as OpenAI's clients send it. The output follows it also without `strict`."""

    name: str = ""
    schema: dict[str, Any] | bool
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(RequestBody, kw_only=True):
    """Of type text, json_object or json_schema. The other fields belong to structural_tag."""

    type: str
    json_schema: NamedSchema | None = None
    format: Any = None
    structures: Any = None
    triggers: Any = None


class StructuredOutputs(RequestBody, kw_only=True):
    """vLLM's form of a constraint: json, regex, choice, grammar or json_object."""

    json: Schema | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: Text | None = None
    disable_any_whitespace: bool | None = None


class GenerationBody(RequestBody, kw_only=True):
    """Parameters of every route that generates text.

    None stands for the default of the model (generation_config.json), or for a random seed.
    """

    model: str
    temperature: Annotated[float, bounds("temperature")] | None = None
    top_p: Annotated[float, bounds("top_p")] | None = None
    top_k: Annotated[int, bounds("top_k")] | None = None
    min_p: Annotated[float, bounds("min_p")] | None = None
    repetition_penalty: Annotated[float, bounds("repetition_penalty")] | None = None
    frequency_penalty: Annotated[float, bounds("frequency_penalty")] | None = None
    presence_penalty: Annotated[float, bounds("presence_penalty")] | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, bounds("seed")] | None = None
    n: Annotated[int, Meta(ge=1)] = 1
    stop: StopString | StopStrings = []
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] = []
    min_tokens: Annotated[int, bounds("min_tokens")] = 0
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False
    cache_salt: Annotated[str, Meta(max_length=128)] = ""
    prompt_cache_key: str = ""
    session_id: str = ""
    priority: Priority | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None


class Prediction(RequestBody, kw_only=True):
    """The output that the client expects. Text parts are joined."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], Meta(max_length=1024)]


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the chat template asks the model to think. Further fields are ignored."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: TokenId | None = None


class ChatReasoning(RequestBody, kw_only=True):
    """OpenRouter's form of the effort, the switch and the budget of the thinking."""

    effort: Annotated[str, Meta(max_length=32)] | None = None
    enabled: bool | None = None
    max_tokens: TokenId | None = None
    exclude: bool = False


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    messages: Annotated[list[Message], Meta(min_length=1)]
    chat_template_kwargs: TemplateOptions = msgspec.field(default_factory=TemplateOptions)
    max_tokens: Annotated[int, bounds("max_tokens")] | None = None
    max_completion_tokens: Annotated[int, bounds("max_tokens")] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, bounds("logprobs")] = 0
    reasoning_effort: Annotated[str, Meta(max_length=32)] | None = None
    reasoning: ChatReasoning | None = None
    enable_thinking: bool | None = None
    thinking: bool | Thinking | None = None
    separate_reasoning: bool = True
    tools: Annotated[list[Tool], Meta(max_length=128)] = []
    tool_choice: ToolMode | ToolChoice | None = None
    parallel_tool_calls: bool = True
    prediction: Prediction | None = None


class TextBody(GenerationBody, kw_only=True):
    """Parameters of the routes that take a prompt instead of a chat."""

    max_tokens: Annotated[int, Meta(ge=0, le=_INT32)] | None = None
    logprobs: Annotated[int, bounds("logprobs")] | None = None
    echo: bool = False


class CompletionBody(TextBody, kw_only=True):
    """POST /v1/completions."""

    prompt: Text | Annotated[list[TokenId | Text | TokenIds], Meta(min_length=1)]


class GenerateBody(TextBody, kw_only=True):
    """POST /generate. The answer has token ids too."""

    input_ids: TokenIds


class TokenizeBody(RequestBody, kw_only=True):
    """POST /tokenize. Exactly one of `prompt` and `messages` is required."""

    model: str | None = None
    prompt: Text | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    chat_template_kwargs: TemplateOptions = msgspec.field(default_factory=TemplateOptions)


class DetokenizeBody(RequestBody, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool = False


class AbortBody(RequestBody, kw_only=True):
    """POST /abort. Ends the requests that have exactly this x-request-id."""

    request_id: Annotated[str, Meta(min_length=1, max_length=128)]


AnyBody: TypeAlias = ChatBody | CompletionBody | GenerateBody  # of the routes that generate
BODIES: dict[str, type[AnyBody]] = {
    CHAT: ChatBody,
    COMPLETIONS: CompletionBody,
    GENERATE: GenerateBody,
}


def known_parameters(kind: type[RequestBody]) -> KnownParameters:
    """The known parameters besides the fields of this body."""
    if issubclass(kind, GenerationBody):
        return PARAMETERS
    found = (PARAMETERS.apis.get(base.__name__) for base in kind.__mro__)
    return next(filter(None, found), KnownParameters())
