"""Sampling parameters of a request. core.columns has the columns that carry them to the device."""

import math
import secrets
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any, Literal

import msgspec

from minisgl.core.errors import InvalidRequest

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20  # the largest number of most likely tokens reported with one token
MAX_TOKENS = 2**31 - 1
# The fields of SamplingParams that constrain the output; a request sets one of them at most.
CONSTRAINTS = ("json_schema", "regex", "choice", "grammar")
MAX_JSON_WHITESPACE = 8  # default for the characters between two tokens of JSON
GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "tool_calls"]


class FinishReason(StrEnum):
    """The reason for the end of a request. Each request ends exactly once."""

    STOP = "stop"  # the request produced an EOS id, a stop token id or a stop string
    LENGTH = "length"  # the request reached max_tokens or the context length
    ABORT = "abort"  # the client disconnected or aborted the request
    ERROR = "error"  # this request failed; other requests go on


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint on the output of one request.

    source       grammar in llguidance's serialised form (JSON or Lark text), already accepted by a
                 tokenizer worker.
    kind         kind of the constraint in the request: the label in metrics.
    think_start  id of the token that opens the thinking of a reasoning model; -1: the model has
                 none.
    think_end    id of the token that closes the thinking; -1: the model has none.
    thinking     "off": the grammar holds from the first token. "open": the prompt ends inside the
                 thinking; the output is free until think_end. "allowed": the model may think first.
                 If the first token is think_start, the output is free until think_end. If not, the
                 grammar holds from the first token.
    trigger      id of a token. After the thinking the output is free until this token, and the
                 grammar holds for the output after it. The output may also end without the token.
                 -1: the grammar holds at once.
    compile_s    CPU seconds of the first compilation; inf: not known.
    """

    source: str
    kind: GrammarKind
    think_start: int = -1
    think_end: int = -1
    thinking: Literal["off", "open", "allowed"] = "off"
    trigger: int = -1
    compile_s: float = math.inf


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters of one request, with every default filled in.

    temperature    0 means greedy; otherwise the logits are divided by it.
    top_k          keep the k most likely tokens; 0 or -1 keeps all.
    top_p          keep the smallest set of tokens whose total probability reaches top_p, which is
                   above 0 and at most 1.
    min_p          drop tokens whose probability is below min_p times the highest probability. From
                   0 to 1.
    seed           a random draw depends only on the seed and the token's position. None: the front
                   end draws a seed.
    max_tokens     limit of output tokens; None: as many as context and KV pool allow.
    min_tokens     EOS and stop token ids cannot be sampled before this many output tokens.
    ignore_eos     the model's EOS ids do not end the request.
    stop_token_ids further ids that end the request.
    frequency_penalty
                   subtracted from a token's logit for each occurrence in the output.
    presence_penalty
                   subtracted once from the logit of each token that occurs in the output.
    repetition_penalty
                   above 1 makes tokens of prompt and output less likely; 1 is off.
    logit_bias     added to the logits of these ids.
    logprobs       number of most likely tokens to report with each output token, with their
                   log-probabilities. The log-probability of the output token is always reported
                   with them. None: report nothing.
    prompt_logprobs
                   number of most likely tokens to report with each prompt token except the first.
    json_schema    a JSON schema that the output follows: a dict, JSON text, a boolean, or a class
                   with the method model_json_schema, such as a Pydantic model.
    regex          the output matches this regex as a whole.
    choice         the output is one of these texts.
    grammar        a Lark or GBNF grammar that the output matches. LLM and the server replace this
                   text, and the three parameters before it, by a Grammar. None: the output is free.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: Any = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: Grammar | str | None = None

    def seeded(self) -> "SamplingParams":
        """Return these parameters, with a random seed if they have none.

        Two equal requests without a seed then get different answers. The operating system
        draws the seed. Seeds from a counter would give the same answers after every restart.
        """
        if self.seed is not None:
            return self
        return msgspec.structs.replace(self, seed=secrets.randbelow(MAX_SEED))

    def __post_init__(self) -> None:
        """Raise InvalidRequest that names the first parameter out of its range."""
        self.validate()

    def validate(self, vocab_size: float = math.inf) -> None:
        """Raise InvalidRequest that names the first parameter out of its range.

        vocab_size: the token ids must be below it. The constructor does not know the vocabulary, so
        it does not check this.
        """
        for name, types, low, high in _BOUNDS:
            value = getattr(self, name)
            if isinstance(value, types) and low <= value <= high:  # rejects NaN, too
                continue
            if value is not None or name not in _OPTIONAL:
                kind = "an integer " if name in _INTEGERS and isinstance(value, float) else ""
                raise InvalidRequest(
                    f"{name} must be {kind}from {low} to {high}, not {str(value)[:40]}", param=name
                )
        if not self.top_p > 0:
            raise InvalidRequest("top_p must be above 0", param="top_p")
        if len(given := [name for name in CONSTRAINTS if getattr(self, name) is not None]) > 1:
            names = " and ".join(given)
            raise InvalidRequest(f"{names} are alternatives; set one of them", param=given[1])
        choice: object = self.choice
        if choice is not None and not (choice and isinstance(choice, (tuple, list))):
            raise InvalidRequest("choice must hold one or more texts", param="choice")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens must not exceed max_tokens", param="min_tokens")
        for name in ("stop_token_ids", "logit_bias"):
            token_ids = getattr(self, name)
            if not isinstance(token_ids, Collection) or not all(
                isinstance(token_id, int) and token_id >= 0 for token_id in token_ids
            ):
                raise InvalidRequest(f"{name} must hold token ids from 0 on", param=name)
            if max(token_ids, default=0) >= vocab_size:
                raise InvalidRequest(f"{name} must have token ids below {vocab_size}", param=name)
        if not isinstance(self.logit_bias, dict) or not all(
            isinstance(bias, (int, float)) and -100 <= bias <= 100
            for bias in self.logit_bias.values()
        ):
            raise InvalidRequest("logit_bias must have values from -100 to 100", param="logit_bias")


_OPTIONAL = ("seed", "max_tokens", "logprobs", "prompt_logprobs")  # parameters that may be None
_INTEGERS = (*_OPTIONAL, "top_k", "min_tokens")
# The smallest and the largest valid value of each parameter. The HTTP API uses the same bounds.
RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_k": (-1, 2**31 - 1),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "seed": (-MAX_SEED - 1, MAX_SEED),
    "max_tokens": (1, MAX_TOKENS),
    "min_tokens": (0, MAX_TOKENS),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),  # a logit divided by a smaller value may overflow
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
# RANGES in the form in which `validate` reads them, for each request three times.
_BOUNDS = tuple(
    (name, (int,) if name in _INTEGERS else (int, float), low, high)
    for name, (low, high) in RANGES.items()
)
