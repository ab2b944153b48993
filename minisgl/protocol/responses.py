"""Response bodies: whole answers, the events of a stream, and errors."""

from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct):
    """cached_tokens: prompt tokens whose keys and values were in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Parts of completion_tokens, and the tokens of the prediction that are not in it.

    reasoning_tokens: tokens of the reasoning.
    accepted_prediction_tokens: tokens that the client's prediction had at their place.
    rejected_prediction_tokens: the other tokens of the prediction.
    """

    reasoning_tokens: int
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    """Token counts of one request. Each prompt counts once, however many answers it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(msgspec.Struct):
    """A likely token. `bytes` is exact; `token` replaces bytes that are not whole characters."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """A generated token with the most likely tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a chat answer, one entry for each token."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct):
    """Log-probabilities of a completion, as four lists with one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


FinishName: TypeAlias = Literal["stop", "length", "tool_calls"]


class AnswerFunction(msgspec.Struct):
    """A called function. `arguments` is the JSON text that the model wrote, which may be invalid.

    In a stream, the first delta of a call has the name and no arguments. The next deltas have
    pieces of the arguments.
    """

    arguments: str
    name: str | UnsetType = UNSET


class AnswerCall(msgspec.Struct, kw_only=True):
    """A tool call that the model wrote. The deltas of a stream have an index."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: AnswerFunction


class AnswerMessage(msgspec.Struct, kw_only=True):
    """The message that the model wrote. `content` is null if it has only tool calls."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnswerCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer to a chat."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishName
    token_ids: list[int] | UnsetType = UNSET


class Delta(msgspec.Struct, omit_defaults=True):
    """New text of a chat answer: content, reasoning, or one part of a tool call."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnswerCall] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """A piece of one answer to a chat. The last piece has the finish reason and no text."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishName | None = None
    token_ids: list[int] | UnsetType = UNSET


class TextChunkChoice(msgspec.Struct, kw_only=True):
    """A piece of one completion. The last piece has the finish reason and no text."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishName | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextChoice(TextChunkChoice, kw_only=True):
    """One whole completion."""

    finish_reason: FinishName


class ResponseHead(msgspec.Struct, kw_only=True):
    """Fields with the same value in the whole answer and in every chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(ResponseHead, kw_only=True):
    """The whole answer to a chat."""

    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(ResponseHead, kw_only=True):
    """One event of a chat's stream. `usage` is present with include_usage only."""

    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextCompletion(ResponseHead, kw_only=True):
    """The whole answer of /v1/completions and /generate."""

    choices: list[TextChoice]
    usage: Usage


class TextCompletionChunk(ResponseHead, kw_only=True):
    """One event of a stream of /v1/completions or /generate."""

    choices: list[TextChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class RenderedPrompt(msgspec.Struct, kw_only=True):
    """The token ids of one prompt, with the parameters that decide which prefixes it shares."""

    request_id: str
    token_ids: list[int]
    model: str
    cache_salt: str | None = None
    priority: int = 0


class TokenizeResponse(msgspec.Struct):
    """Token ids of a prompt or chat. token_strs: the text of each token."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeResponse(msgspec.Struct):
    """Text of token ids."""

    prompt: str


class AbortResponse(msgspec.Struct):
    """Number of requests that the server ended."""

    aborted: int


class StatusResponse(msgspec.Struct):
    """`ok`, or the reason of a status other than 200."""

    status: str


class VersionResponse(msgspec.Struct):
    """The version of the server."""

    version: str


class ModelCard(msgspec.Struct, kw_only=True):
    """A served model name. The last two fields are null until the model is loaded.

    sampling_defaults: the value of each sampling parameter that a request leaves out.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "minisgl"
    max_model_len: int | None
    sampling_defaults: dict[str, float] | None


class ModelList(msgspec.Struct, kw_only=True):
    """All served model names."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorDetail(msgspec.Struct):
    """An error. `param` names the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct):
    """The body of every answer with a status of 400 or more."""

    error: ErrorDetail
