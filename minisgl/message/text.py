"""The parts of StartText and TextUpdate: options, tokens with log-probabilities, tool calls."""

import msgspec

# Number of last prompt tokens in TextOptions. A character has at most four bytes, so an incomplete
# character at the end of the prompt has at most three tokens. The four tokens also show whether the
# template has opened or closed thinking at the end of the prompt.
PROMPT_TAIL_TOKENS = 4


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One token as text with its log-probability.

    token_bytes  the bytes of the token, which need not be whole characters.
    logprob      None for the first token of a prompt.
    offset       number of characters of the text before this token.
    top          bytes and log-probability of the most likely tokens, the most likely first.
    ends         True if the token ended the text. The text does not contain it.
    """

    token_bytes: bytes
    logprob: float | None
    offset: int
    top: list[tuple[bytes, float]]
    ends: bool = False


class ToolCallDelta(msgspec.Struct, frozen=True, array_like=True):
    """The beginning of a tool call, with its id and name, or a piece of its arguments.

    index      number of the call in its answer, from 0.
    arguments  the next piece of the JSON text; "" at the beginning of the call.
    """

    index: int
    arguments: str
    id: str = ""
    name: str = ""


class ToolOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings with which the detokenizer finds the tool calls of one request.

    format      name of the call format.
    parameters  the JSON types of the parameters of each tool (tool_calls.schema.ParameterTypes).
    """

    format: str
    parameters: dict[str, dict[str, list[str]]]


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options for the conversion of one request's tokens to text.

    prompt_tail          the last ids of the prompt. A character of the output, or thinking, may
                         begin in them.
    stop                 stop strings, in the order in which the client gave them.
    skip_special_tokens  leave special tokens out of the text.
    include_stop         include the stop string that ended the text.
    min_tokens           ignore stop strings in the first min_tokens output tokens.
    prompt_ids           int32 little-endian; the whole prompt if the client wants its logprobs.
    token_ids            send the output ids in the updates too.
    reasoning            report text between <think> and </think>, or the reasoning that the parser
                         of `tools` finds, separately from the answer.
    silent               drop the output tokens, because the client wants the prompt only.
    at_end               convert all tokens in one update, at the end. It needs an empty `stop`, and
                         the update has no log-probabilities of output tokens.
    tools                report tool calls apart from the answer; None: they are text. A model whose
                         answers consist of sections has it in every chat.
    """

    prompt_tail: list[int] = []
    stop: list[str] = []
    skip_special_tokens: bool = True
    include_stop: bool = False
    min_tokens: int = 0
    prompt_ids: bytes = b""
    token_ids: bool = False
    reasoning: bool = False
    silent: bool = False
    at_end: bool = False
    tools: ToolOptions | None = None
