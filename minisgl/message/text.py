"""The parts of TextOptions and TextUpdate: tokens with log-probabilities, pieces of tool calls."""

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
