"""Sampling parameters of one request, already validated and with every default filled in."""

import math
from enum import StrEnum

import msgspec

from minisgl.core.errors import InvalidRequest

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20  # most likely tokens reported per token


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

    def validate(self) -> None:
        """Raise InvalidRequest that names the first parameter out of its range."""
        _require(
            math.isfinite(self.temperature) and 0 <= self.temperature <= 2,
            "temperature",
            "must be a number from 0 to 2",
        )
        _require(
            -1 <= self.top_k < 2**31, "top_k", "must be -1 or 0 (off), or from 1 to 2147483647"
        )
        _require(0 < self.top_p <= 1, "top_p", "must be above 0 and at most 1")
        _require(0 <= self.min_p <= 1, "min_p", "must be from 0 to 1")
        _require(
            self.seed is None or -MAX_SEED - 1 <= self.seed <= MAX_SEED,
            "seed",
            "must fit into 64 bits",
        )
        _require(
            self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "must be at least 1"
        )
        _require(self.min_tokens >= 0, "min_tokens", "must not be negative")
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            "must not exceed max_tokens",
        )
        _require(all(t >= 0 for t in self.stop_token_ids), "stop_token_ids", "must not be negative")
        self._validate_extras()

    def _validate_extras(self) -> None:
        for name in ("frequency_penalty", "presence_penalty"):
            _require(-2 <= getattr(self, name) <= 2, name, "must be from -2 to 2")
        _require(
            # much smaller ones would make logits infinite
            0.01 <= self.repetition_penalty <= 100,
            "repetition_penalty",
            "must be from 0.01 to 100",
        )
        for token_id, bias in self.logit_bias.items():
            _require(token_id >= 0, "logit_bias", "must have token ids as keys")
            _require(-100 <= bias <= 100, "logit_bias", "must have values from -100 to 100")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _require(
                count is None or 0 <= count <= MAX_LOGPROBS,
                name,
                f"must be from 0 to {MAX_LOGPROBS}",
            )


def _require(holds: bool, param: str, rule: str) -> None:
    if not holds:
        raise InvalidRequest(f"{param} {rule}", param=param)
