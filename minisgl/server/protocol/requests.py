"""Request bodies.

`decode` removes the null parameters of a body before it fills the struct, so null means absent.
"""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from minisgl.core.sampling import RANGES

CHAT = "chat"
COMPLETIONS = "completions"
GENERATE = "generate"

_INT32 = 2**31 - 1


def _range(name: str, description: str) -> Meta:
    """The range of this parameter in core.sampling, with a description."""
    low, high = RANGES[name]
    if name == "top_p":  # 0 would keep no token
        return Meta(gt=low, le=high, description=description)
    return Meta(ge=low, le=high, description=description)


def _text(description: str) -> Meta:
    return Meta(description=description)


# Types that several parameters share.
TokenId = Annotated[int, Meta(ge=0, le=_INT32)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
Text = Annotated[str, Meta(min_length=1)]
ShortText = Annotated[str, Meta(max_length=64)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
StopStrings = Annotated[list[StopString], Meta(max_length=16)]
Bias = Annotated[float, Meta(ge=-100, le=100)]

# Types of single parameters. The structs below contain the types that fit into one line.
Temperature = Annotated[float, _range("temperature", "0 always chooses the most likely token.")]
TopP = Annotated[float, _range("top_p", "Sample from the smallest set with this probability.")]
TopK = Annotated[int, _range("top_k", "Sample from the k most likely tokens; 0 and -1: from all.")]
MinP = Annotated[float, _range("min_p", "Drop tokens below min_p times the top probability.")]
Seed = Annotated[int, _range("seed", "A draw depends only on the seed and the token's position.")]
MinTokens = Annotated[
    int, _range("min_tokens", "EOS, stop ids and stop strings do not end a shorter text.")
]
Frequency = Annotated[
    float, _range("frequency_penalty", "Lowers the logit of a token for each time it occurred.")
]
Presence = Annotated[
    float, _range("presence_penalty", "Lowers the logit of each token that occurred in the output.")
]
Repetition = Annotated[
    float, _range("repetition_penalty", "Above 1, tokens of prompt and output become less likely.")
]
ChatTokens = Annotated[
    int, _range("max_tokens", "Limit of output tokens. The default is the rest of the context.")
]
TopLogprobs = Annotated[int, _range("logprobs", "Number of likely tokens to report per token.")]
TextTokens = Annotated[
    int,
    Meta(ge=0, le=_INT32, description="Limit of output tokens; 0 needs echo. The default is 16."),
]
Stop = Annotated[StopString | StopStrings, _text("The text ends before a stop string.")]
StopIds = Annotated[list[TokenId], Meta(max_length=128, description="Token ids that end the text.")]
LogitBias = Annotated[
    dict[TokenId, Bias],
    Meta(
        description="Numbers to add to the logits of token ids.",
        extra_json_schema={"propertyNames": {"pattern": "^[0-9]{1,9}$"}},
    ),
]
SkipSpecial = Annotated[bool, _text("Leave special tokens out of the text.")]
KeepStop = Annotated[bool, _text("Keep the stop string that ended the text.")]
ReturnIds = Annotated[bool, _text("Add prompt_token_ids, and token_ids to each choice.")]
Salt = Annotated[
    str, Meta(max_length=128, description="Requests with different salts share no cached prefix.")
]
Separate = Annotated[bool, _text("Move text in `<think>` to `reasoning_content`.")]
Schema = dict[str, Any] | bool | str  # a JSON schema, or its JSON text
Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]
# Clients that send an earlier answer back also send these fields, with an empty value.
Empty = Annotated[str, Meta(max_length=0)] | Annotated[list[Any], Meta(max_length=0)] | None
EMPTY_FIELDS = ("refusal", "annotations", "audio", "function_call", "reasoning")
Role = Literal["system", "developer", "user", "assistant", "tool"]


class RequestBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of the objects in which an unknown field is an error."""


class TextPart(RequestBody, kw_only=True):
    """One part of a message's content. Only text is supported."""

    type: Literal["text"]
    text: str


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


class Message(RequestBody, kw_only=True, omit_defaults=True):
    """One message of a chat."""

    role: Role
    content: str | Annotated[list[TextPart], Meta(max_length=1024)] | UnsetType | None = UNSET
    tool_calls: Annotated[list[ToolCall], Meta(max_length=128)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: Empty = None
    annotations: Empty = None
    audio: Empty = None
    function_call: Empty = None
    reasoning: Empty = None


class TemplateOptions(RequestBody, kw_only=True, omit_defaults=True):
    """Variables of the chat template that a request may set."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    preserve_thinking: bool | None = None
    reasoning_effort: Annotated[str, Meta(max_length=32)] | None = None
    thinking_budget: TokenId | None = None
    date_string: ShortText | None = None
    builtin_tools: Annotated[list[ShortText], Meta(max_length=16)] | None = None


class StreamOptions(RequestBody, kw_only=True):
    """`include_usage` adds a last event with the token counts."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class NamedSchema(RequestBody, kw_only=True):
    """A JSON schema as OpenAI's clients send it. The output follows it whatever `strict` says."""

    name: str = ""
    schema: dict[str, Any] | bool
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(RequestBody, kw_only=True):
    """text, json_object or json_schema. The last three fields belong to structural_tag."""

    type: str
    json_schema: NamedSchema | None = None
    format: Any = None
    structures: Any = None
    triggers: Any = None


class StructuredOutputs(RequestBody, kw_only=True):
    """vLLM's form of a constraint: exactly one of the first five fields, and the white space."""

    json: Schema | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: Text | None = None
    disable_any_whitespace: bool | None = None


Structured = Annotated[StructuredOutputs, _text("A constraint on the answer.")]


class GenerationBody(RequestBody, kw_only=True):
    """Parameters of every route that generates text.

    None stands for the default of the model (generation_config.json), or for a random seed.
    """

    model: Annotated[str, _text("A served model name.")]
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: Repetition | None = None
    frequency_penalty: Frequency | None = None
    presence_penalty: Presence | None = None
    logit_bias: LogitBias | None = None
    seed: Seed | None = None
    n: Annotated[int, Meta(ge=1, description="Number of answers to each prompt.")] = 1
    stop: Stop = []
    stop_token_ids: StopIds = []
    min_tokens: MinTokens = 0
    ignore_eos: Annotated[bool, _text("EOS does not end the text.")] = False
    stream: Annotated[bool, _text("Answer by server-sent events.")] = False
    stream_options: StreamOptions | None = None
    skip_special_tokens: SkipSpecial = True
    include_stop_str_in_output: KeepStop = False
    return_token_ids: ReturnIds = False
    cache_salt: Salt = ""
    response_format: Annotated[ResponseFormat, _text("The form of the answer.")] | None = None
    structured_outputs: Structured | None = None
    guided_json: Annotated[Schema, _text("As structured_outputs.json.")] | None = None
    guided_regex: Annotated[str, _text("As structured_outputs.regex.")] | None = None
    guided_choice: Annotated[Choices, _text("As structured_outputs.choice.")] | None = None
    guided_grammar: Annotated[str, _text("As structured_outputs.grammar.")] | None = None
    regex: Annotated[str, _text("As structured_outputs.regex.")] | None = None
    ebnf: Annotated[str, _text("As structured_outputs.grammar.")] | None = None


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, description="The chat so far.")]
    chat_template_kwargs: TemplateOptions = msgspec.field(default_factory=TemplateOptions)
    max_tokens: ChatTokens | None = None
    max_completion_tokens: ChatTokens | None = None
    logprobs: Annotated[bool, _text("Report the log-probability of each token.")] = False
    top_logprobs: TopLogprobs = 0
    separate_reasoning: Separate = True


class TextBody(GenerationBody, kw_only=True):
    """Parameters of the routes that take a prompt instead of a chat."""

    max_tokens: TextTokens | None = None
    logprobs: Annotated[int, _range("logprobs", "Number of likely tokens to report.")] | None = None
    echo: Annotated[bool, _text("Begin the text with the prompt.")] = False


class CompletionBody(TextBody, kw_only=True):
    """POST /v1/completions."""

    prompt: Annotated[
        Text | Annotated[list[TokenId | Text | TokenIds], Meta(min_length=1)],
        _text("Text, token ids, or a list of either."),
    ]


class GenerateBody(TextBody, kw_only=True):
    """POST /generate. The answer has token ids too."""

    input_ids: Annotated[TokenIds, _text("The prompt.")]


class TokenizeBody(RequestBody, kw_only=True):
    """POST /tokenize. Exactly one of `prompt` and `messages` is required."""

    model: str | None = None
    prompt: Text | None = None
    add_special_tokens: bool = True
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

# Parameters that the server accepts and ignores, because they do not change the answer.
IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)

# Parameters that the server knows but does not support. A request may contain one of them only with
# null or with one of these neutral values, which do not change the answer.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "custom_logit_processor": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "priority": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "stop_regex": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
