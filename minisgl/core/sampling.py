"""Sampling parameters of one request, already validated and with every default filled in."""

import math
import secrets
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

import msgspec

from minisgl.core.errors import InvalidRequest

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20  # most likely tokens reported per token
MAX_TOKENS = 2**31 - 1


class FinishReason(StrEnum):
    """Why a request ended. Each request ends exactly once."""

    STOP = "stop"  # an EOS id, a stop token id or a stop string
    LENGTH = "length"  # max_tokens or the context length
    ABORT = "abort"  # the client went away, or asked for it
    ERROR = "error"  # this request alone failed


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose the next tokens.

    temperature    0 means greedy; otherwise logits are divided by it.
    top_k          keep the k most likely tokens; 0 or -1 keeps all.
    top_p          keep the smallest set whose probability reaches top_p, in (0, 1].
    min_p          drop tokens less likely than min_p times the most likely one, in [0, 1].
    seed           a draw depends only on (seed, position of the token); None: drawn at admission.
    max_tokens     output tokens at most; None: as many as context and KV pool allow.
    min_tokens     EOS and stop token ids cannot be chosen before this many output tokens.
    ignore_eos     the model's EOS ids do not end the request.
    stop_token_ids further ids that end the request.
    frequency_penalty, presence_penalty
                   subtracted from the logit of a token per occurrence, or once, in the output.
    repetition_penalty
                   above 1 makes tokens of prompt and output less likely; 1 is off.
    logit_bias     added to the logits of these ids.
    logprobs       report the log-probability of each token and of this many most likely ones.
    prompt_logprobs
                   the same for each prompt token but the first.
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

    @property
    def has_penalties(self) -> bool:
        """Some logit depends on which tokens have occurred."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1)

    @property
    def has_extras(self) -> bool:
        """The engine must do more than choose a token by temperature and filters."""
        asks = self.logprobs is not None or self.prompt_logprobs is not None
        return asks or self.has_penalties or bool(self.logit_bias) or self.min_tokens > 0

    def seeded(self) -> "SamplingParams":
        """With a fresh seed where none is given: two requests for the same thing differ.

        From the system's randomness: a seed that counts up would give the same answers again after
        every restart.
        """
        if self.seed is not None:
            return self
        return msgspec.structs.replace(self, seed=secrets.randbelow(MAX_SEED))

    def validate(self, vocab_size: float = math.inf) -> None:
        """Raise InvalidRequest that names the first parameter out of its range."""
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:  # nor is NaN
                raise InvalidRequest(f"{name} must be from {low} to {high}", param=name)
        if not self.top_p > 0:
            raise InvalidRequest("top_p must be above 0", param="top_p")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens must not exceed max_tokens", param="min_tokens")
        for name in ("stop_token_ids", "logit_bias"):
            token_ids = getattr(self, name)
            if min(token_ids, default=0) < 0:
                raise InvalidRequest(f"{name} must hold no negative token id", param=name)
            if max(token_ids, default=0) >= vocab_size:
                raise InvalidRequest(f"{name} must have token ids below {vocab_size}", param=name)
        if not all(-100 <= bias <= 100 for bias in self.logit_bias.values()):
            text = "logit_bias must have values from -100 to 100"
            raise InvalidRequest(text, param="logit_bias")


# The only home of these ranges; both ends are allowed. The HTTP API takes its bounds from here.
RANGES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "temperature": (0, 2),
        "top_k": (-1, 2**31 - 1),
        "top_p": (0, 1),
        "min_p": (0, 1),
        "seed": (-MAX_SEED - 1, MAX_SEED),
        "max_tokens": (1, MAX_TOKENS),
        "min_tokens": (0, MAX_TOKENS),
        "frequency_penalty": (-2, 2),
        "presence_penalty": (-2, 2),
        "repetition_penalty": (0.01, 100),  # much smaller ones would make logits infinite
        "logprobs": (0, MAX_LOGPROBS),
        "prompt_logprobs": (0, MAX_LOGPROBS),
    }
)
