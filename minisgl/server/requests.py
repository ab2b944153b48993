"""From a JSON body to one complete `GenerateRequest`: parse, check, fill defaults, cross-check."""

import array
from typing import Any, TypeAlias

import msgspec

from minisgl.core import InvalidRequest, ModelFacts, PromptTooLong, SamplingParams
from minisgl.message import TextSpec, TokenizeChat, TokenizeText
from minisgl.server import checks
from minisgl.server.chat import count_chars
from minisgl.server.config import ServerConfig
from minisgl.server.params import CHAT, GENERATE, ParamTable

TokenArray: TypeAlias = "array.array[int]"  # int32 ids; quoted: not subscriptable in 3.11
COMPLETIONS_MAX_TOKENS = 16  # OpenAI's default for the legacy route; a chat may fill the context
_CHARS_PER_CONTEXT_TOKEN = 32
_WORKED_OUT = frozenset({"max_tokens", "stop_token_ids", "logprobs"})
# The others that are called the same in SamplingParams are taken as they are.
_AS_GIVEN = frozenset(SamplingParams.__struct_fields__) - _WORKED_OUT

# Ids are each below the logit width; text and chats are for a tokenizer worker.
Prompt: TypeAlias = "TokenizeChat | TokenizeText | array.array[int]"


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP call, complete: every default filled in, every limit checked that needs no tokens.

    prompts: each with its name in errors.
    text: what the detokenizer is told, but for the prompt; its `silent` when no answer is wanted
    (max_tokens 0), only the echo with its log-probabilities.
    explicit_max_tokens: the client asked for sampling.max_tokens, so a prompt that leaves less
    room is refused; otherwise the number shrinks to the room.
    """

    route: str
    model: str
    prompts: tuple[tuple[str, Prompt], ...]
    n: int
    sampling: SamplingParams
    text: TextSpec
    explicit_max_tokens: bool
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    cache_salt: str = ""

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n


class RequestReader:
    """The one validator behind all generating routes."""

    def __init__(self, config: ServerConfig) -> None:
        self._limits = config.limits
        self._use_model_defaults = not config.ignore_generation_config
        self.table = ParamTable(config.limits, config.served_names, config.allow_unknown_params)

    def read(self, route: str, raw: bytes, facts: ModelFacts) -> GenerateRequest:
        """Raises RequestError of the class and with the param that the client should see."""
        given = self.table.validate(route, parse_body(raw))
        if "model" not in given:
            raise InvalidRequest("model is required", param="model")
        limits = self._limits
        if route == CHAT:
            prompts = [("messages", self.chat_prompt(given, facts))]
        else:
            prompts = self._prompts(route, given, facts)
        n = given.get("n", 1)
        if len(prompts) * n > limits.max_choices:
            most = f"times prompts must be at most {limits.max_choices}"
            raise checks.reject("n", most, "max_choices")
        if "stream_options" in given and not given.get("stream"):
            raise checks.reject("stream_options", "is allowed only with stream set to true")
        max_tokens = given.get("max_completion_tokens", given.get("max_tokens"))
        echo = given.get("echo", False)
        silent = max_tokens == 0
        if silent and not echo:
            raise checks.reject("max_tokens", "must be at least 1 without echo")
        text = TextSpec(
            stop=given.get("stop", []),
            skip_special_tokens=given.get("skip_special_tokens", True),
            include_stop=given.get("include_stop_str_in_output", False),
            min_tokens=given.get("min_tokens", 0),
            token_ids=route == GENERATE or given.get("return_token_ids", False),
            reasoning=route == CHAT and given.get("separate_reasoning", True),
            silent=silent,
        )
        return GenerateRequest(
            route=route,
            model=given["model"],
            prompts=tuple(prompts),
            n=n,
            sampling=self._sampling(route, given, 1 if silent else max_tokens, facts),
            text=text,
            explicit_max_tokens=max_tokens is not None,
            stream=given.get("stream", False),
            include_usage=given.get("stream_options", {}).get("include_usage", False),
            echo=echo,
            cache_salt=given.get("cache_salt", ""),
        )

    def _sampling(
        self, route: str, given: dict[str, Any], max_tokens: int | None, facts: ModelFacts
    ) -> SamplingParams:
        chosen: dict[str, Any] = {}
        if self._use_model_defaults:
            chosen |= facts.sampling_defaults
        chosen |= {name: value for name, value in given.items() if name in _AS_GIVEN}
        if max_tokens is None and route != CHAT:
            max_tokens = COMPLETIONS_MAX_TOKENS
        logprobs = _logprobs(route, given)
        sampling = SamplingParams(
            **chosen,
            max_tokens=max_tokens,
            stop_token_ids=tuple(given.get("stop_token_ids", ())),
            logprobs=logprobs,
            prompt_logprobs=logprobs if given.get("echo") else None,
        )
        sampling.validate(facts.vocab_size)
        return sampling

    def _check_chars(self, param: str, chars: int, facts: ModelFacts) -> None:
        most = self._limits.max_prompt_chars
        if most is None:
            most = _CHARS_PER_CONTEXT_TOKEN * facts.max_seq_len
        if chars > most:
            raise PromptTooLong(
                f"{param} has {chars} characters, more than the {most} that are accepted "
                f"for a context of {facts.max_seq_len} tokens",
                param=param,
                limit="max_prompt_chars",
            )

    def chat_prompt(self, given: dict[str, Any], facts: ModelFacts) -> Prompt:
        """The messages and chat_template_kwargs of a checked body."""
        if "messages" not in given:
            raise InvalidRequest("messages is required", param="messages")
        messages = given["messages"]
        self._check_chars("messages", sum(map(count_chars, messages)), facts)
        return TokenizeChat(
            messages_json=msgspec.json.encode(messages),
            template_kwargs_json=msgspec.json.encode(given.get("chat_template_kwargs", {})),
        )

    def _prompts(
        self, route: str, given: dict[str, Any], facts: ModelFacts
    ) -> list[tuple[str, Prompt]]:
        """A prompt is text, a list of ids, or a list of either; input_ids is one list of ids."""
        name = "input_ids" if route == GENERATE else "prompt"
        value = given.get(name)
        if value is None:
            raise InvalidRequest(f"{name} is required", param=name)
        if route == GENERATE:
            return [(name, self.ids_prompt(name, value, facts))]
        named = [(name, value)]
        if isinstance(value, list) and value and not isinstance(value[0], int):
            if len(value) > self._limits.max_choices:
                most = f"must have at most {self._limits.max_choices} items"
                raise checks.reject(name, most, "max_prompts")
            named = [(f"{name}[{index}]", item) for index, item in enumerate(value)]
        return [(param, self._prompt(param, item, facts)) for param, item in named]

    def _prompt(self, param: str, value: Any, facts: ModelFacts) -> Prompt:
        is_list = isinstance(value, list)
        return (self.ids_prompt if is_list else self.text_prompt)(param, value, facts)

    def text_prompt(
        self, param: str, value: Any, facts: ModelFacts, add_special: bool = True
    ) -> Prompt:
        text = checks.string(empty=False)(param, value)
        self._check_chars(param, len(text), facts)
        return TokenizeText(text=text, add_special=add_special)

    def ids_prompt(self, param: str, value: Any, facts: ModelFacts) -> TokenArray:
        checks.require_type(param, value, "an array of token ids", list)
        if not value:
            raise checks.reject(param, "must not be empty")
        if len(value) > facts.max_seq_len:
            text = f"{param} has {len(value)} tokens; the context length is {facts.max_seq_len}"
            raise PromptTooLong(text, param=param)
        plain = set(map(type, value)) == {int}  # all at once: a ninth of the time, one by one
        if not plain or min(value) < 0 or max(value) >= facts.vocab_size:
            check = checks.integer(0, facts.vocab_size - 1)
            for index, item in enumerate(value):
                check(f"{param}[{index}]", item)
        return array.array("i", value)


def _logprobs(route: str, given: dict[str, Any]) -> int | None:
    """How many most likely tokens to report, None for no report at all."""
    if route != CHAT:
        return given.get("logprobs")
    if given.get("logprobs"):
        return int(given.get("top_logprobs", 0))
    if given.get("top_logprobs"):
        raise checks.reject("top_logprobs", "is allowed only with logprobs set to true")
    return None


def parse_body(raw: bytes) -> dict[str, Any]:
    """A JSON object. NaN, Infinity, lone surrogates and endless nesting are not JSON here."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error)[:200] if isinstance(error, msgspec.MsgspecError) else "not readable"
        text = f"the body is not valid JSON: {reason}"
        raise InvalidRequest(text, code="invalid_json") from None
    if isinstance(body, dict):
        return body
    text = f"the body must be a JSON object, not {checks.type_name(body)}"
    raise InvalidRequest(text, code="invalid_json")
