"""From a JSON body to one complete `GenerateRequest`: parse, check, fill defaults, cross-check."""

from typing import Any

import msgspec

from minisgl.core import InvalidRequest, ModelFacts, PromptTooLong, SamplingParams
from minisgl.server import checks
from minisgl.server.chat import read_messages
from minisgl.server.config import ServerConfig
from minisgl.server.errors import ModelNotFound
from minisgl.server.params import CHAT, GENERATE, ParamTable

COMPLETIONS_MAX_TOKENS = 16  # OpenAI's default for the legacy route; a chat may fill the context
_CHARS_PER_CONTEXT_TOKEN = 32


class ChatPrompt(msgspec.Struct, frozen=True):
    """A chat to be rendered by the tokenizer worker."""

    messages_json: bytes
    template_kwargs_json: bytes


class TextPrompt(msgspec.Struct, frozen=True):
    """Plain text. add_special: with the BOS that the tokenizer may set before it."""

    text: str
    add_special: bool = True


class IdsPrompt(msgspec.Struct, frozen=True):
    """Token ids, each below the logit width."""

    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | IdsPrompt


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP call, complete: every default filled in, every limit checked that needs no tokens.

    silent: no answer is wanted (max_tokens 0), only the echo with its log-probabilities.
    explicit_max_tokens: the client asked for sampling.max_tokens, so a prompt that leaves less
    room is refused; otherwise the number shrinks to the room.
    """

    route: str
    model: str
    prompts: tuple[Prompt, ...]
    n: int
    sampling: SamplingParams
    explicit_max_tokens: bool
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    silent: bool = False
    return_token_ids: bool = False
    reasoning: bool = False
    cache_salt: str = ""

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n


class RequestReader:
    """The one validator behind all generating routes."""

    def __init__(self, config: ServerConfig) -> None:
        self._served_names = config.served_names
        self._limits = config.limits
        self._use_model_defaults = not config.ignore_generation_config
        self._table = ParamTable(config.limits, config.allow_unknown_params)

    def check_model(self, name: str) -> None:
        """Raise ModelNotFound unless this name is served."""
        if name not in self._served_names:
            raise ModelNotFound(f"the model '{name[:128]}' does not exist", param="model")

    @property
    def table(self) -> ParamTable:
        """What each route offers."""
        return self._table

    def read(self, route: str, raw: bytes, facts: ModelFacts) -> GenerateRequest:
        """Raises RequestError of the class and with the param that the client should see."""
        given = self._table.validate(route, parse_body(raw))
        if "model" not in given:
            raise InvalidRequest("model is required", param="model")
        self.check_model(given["model"])
        limits = self._limits
        if route == CHAT:
            prompts: tuple[Prompt, ...] = (self.chat_prompt(given, facts),)
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
        return GenerateRequest(
            route=route,
            model=given["model"],
            prompts=prompts,
            n=n,
            sampling=self._sampling(route, given, 1 if silent else max_tokens, facts),
            explicit_max_tokens=max_tokens is not None,
            stop=tuple(given.get("stop", ())),
            include_stop=given.get("include_stop_str_in_output", False),
            skip_special_tokens=given.get("skip_special_tokens", True),
            stream=given.get("stream", False),
            include_usage=given.get("stream_options", {}).get("include_usage", False),
            echo=echo,
            silent=silent,
            return_token_ids=route == GENERATE or given.get("return_token_ids", False),
            reasoning=route == CHAT and given.get("separate_reasoning", True),
            cache_salt=given.get("cache_salt", ""),
        )

    def _sampling(
        self, route: str, given: dict[str, Any], max_tokens: int | None, facts: ModelFacts
    ) -> SamplingParams:
        def pick(name: str, of_model: Any, otherwise: Any) -> Any:
            if name in given:
                return given[name]
            use = self._use_model_defaults and of_model is not None
            return of_model if use else otherwise

        for name in ("stop_token_ids", "logit_bias"):
            if any(token_id >= facts.vocab_size for token_id in given.get(name, ())):
                raise checks.reject(name, f"must have token ids below {facts.vocab_size}")
        logprobs = _logprobs(route, given)
        sampling = SamplingParams(
            temperature=pick("temperature", facts.default_temperature, 1.0),
            top_k=pick("top_k", facts.default_top_k, -1),
            top_p=pick("top_p", facts.default_top_p, 1.0),
            min_p=pick("min_p", facts.default_min_p, 0.0),
            seed=given.get("seed"),
            max_tokens=COMPLETIONS_MAX_TOKENS
            if max_tokens is None and route != CHAT
            else max_tokens,
            min_tokens=given.get("min_tokens", 0),
            ignore_eos=given.get("ignore_eos", False),
            stop_token_ids=tuple(given.get("stop_token_ids", ())),
            frequency_penalty=given.get("frequency_penalty", 0.0),
            presence_penalty=given.get("presence_penalty", 0.0),
            repetition_penalty=pick("repetition_penalty", facts.default_repetition_penalty, 1.0),
            logit_bias=given.get("logit_bias", {}),
            logprobs=logprobs,
            prompt_logprobs=logprobs if given.get("echo") else None,
        )
        sampling.validate()
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

    def chat_prompt(self, given: dict[str, Any], facts: ModelFacts) -> ChatPrompt:
        """The checked messages and chat_template_kwargs of a body."""
        messages, chars = read_messages(given.get("messages"), self._limits.max_messages)
        self._check_chars("messages", chars, facts)
        return ChatPrompt(
            msgspec.json.encode(messages),
            msgspec.json.encode(given.get("chat_template_kwargs", {})),
        )

    def _prompts(self, route: str, given: dict[str, Any], facts: ModelFacts) -> tuple[Prompt, ...]:
        """A prompt is text, a list of ids, or a list of either; input_ids is one list of ids."""
        name = "input_ids" if route == GENERATE else "prompt"
        value = given.get(name)
        if value is None:
            raise InvalidRequest(f"{name} is required", param=name)
        if route == GENERATE:
            if isinstance(value, str):
                raise checks.reject(name, "must be an array of token ids, not a string")
            return (self.one_prompt(name, value, facts),)
        if isinstance(value, list) and value and not isinstance(value[0], int):
            if len(value) > self._limits.max_prompts:
                most = f"must have at most {self._limits.max_prompts} items"
                raise checks.reject("prompt", most, "max_prompts")
            named = [(f"prompt[{index}]", item) for index, item in enumerate(value)]
        else:
            named = [("prompt", value)]
        return tuple(self.one_prompt(param, item, facts) for param, item in named)

    def one_prompt(self, param: str, value: Any, facts: ModelFacts) -> Prompt:
        """Text or ids, checked."""
        if isinstance(value, str):
            text = checks.string(empty=False)(param, value)
            self._check_chars(param, len(text), facts)
            return TextPrompt(text)
        if not isinstance(value, list):
            raise checks.reject(
                param, f"must be a string or an array of token ids, not {checks.type_name(value)}"
            )
        if not value:
            raise checks.reject(param, "must not be empty")
        if len(value) > facts.max_seq_len:
            raise PromptTooLong(
                f"{param} has {len(value)} tokens; the context length is {facts.max_seq_len}",
                param=param,
            )
        plain = set(map(type, value)) == {int}  # all at once: a ninth of the time, one by one
        if not plain or min(value) < 0 or max(value) >= facts.vocab_size:
            check = checks.integer(0, facts.vocab_size - 1)
            for index, item in enumerate(value):
                check(f"{param}[{index}]", item)
        return IdsPrompt(tuple(value))


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
        reason = str(error) if isinstance(error, msgspec.MsgspecError) else type(error).__name__
        raise InvalidRequest(
            f"the body is not valid JSON: {reason[:200]}", code="invalid_json"
        ) from None
    if not isinstance(body, dict):
        raise InvalidRequest(
            f"the body must be a JSON object, not {checks.type_name(body)}", code="invalid_json"
        )
    return body
