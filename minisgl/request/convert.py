"""Converts the bytes of a body to one complete `CallRequest`, or raises an error.

The structs of `protocol` hold the rules for single fields, and `decode` applies them. This module
checks the rules that need several fields, the configuration or the model, and fills in defaults.
"""

import array
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import msgspec

from minisgl.core import (
    InvalidRequest,
    ModelFacts,
    ModelNotFound,
    PromptTooLong,
    SamplingParams,
    Unsupported,
)
from minisgl.core.sampling import CONSTRAINTS, RANGES
from minisgl.message.messages import DecodeIds, TextOptions, TokenizeChat, TokenizeText
from minisgl.protocol import messages_api, requests, responses_api
from minisgl.request import from_messages, from_responses
from minisgl.request.chat import (
    atem_chat,
    check_effort,
    ending,
    harmony_chat,
    prepare_messages,
    set_thinking,
)
from minisgl.request.constraints import ConstraintRequest, constraint_of
from minisgl.request.decode import body_of, decode, nesting_limit, reject
from minisgl.request.images import check_source_images
from minisgl.request.paths import SAME_PATHS, Paths
from minisgl.request.question import Question
from minisgl.request.sizes import check_sizes
from minisgl.request.tools import ToolRequest, shorten_ids, tools_of
from minisgl.request.translation import Breakpoints, Translation
from minisgl.settings.config import ServerConfig

TokenArray: TypeAlias = "array.array[int]"  # int32 ids; quoted: not subscriptable in Python 3.11
# A chat or text for a tokenizer worker, or token ids.
Prompt: TypeAlias = "TokenizeChat | TokenizeText | array.array[int]"

COMPLETIONS_MAX_TOKENS = 16  # OpenAI's default for completions; a chat may fill the context
_CHARS_PER_CONTEXT_TOKEN = 32
# Parameters with the same name and meaning in the body and in SamplingParams.
_SAME_IN_SAMPLING = (
    set(SamplingParams.__struct_fields__) & set(requests.GenerationBody.__struct_fields__)
) - {"stop_token_ids", *CONSTRAINTS}
# The sampling parameters with a default of the model, which /v1/models shows.
_MODEL_DEFAULTS = tuple(
    field.name
    for field in msgspec.structs.fields(requests.GenerationBody)
    if field.name in RANGES and field.default is None and field.name != "seed"
)
# The body of each route, with the function that translates it.
_BODIES: Mapping[str, tuple[type[requests.RequestBody], Callable[[Any], Translation]]] = {
    **{route: (kind, Translation) for route, kind in requests.BODIES.items()},
    requests.RESPONSES: (responses_api.ResponsesBody, from_responses.translate),
    requests.INPUT_TOKENS: (responses_api.InputTokensBody, from_responses.translate),
    requests.MESSAGES: (messages_api.MessagesBody, from_messages.translate),
    requests.COUNT_TOKENS: (messages_api.CountTokensBody, from_messages.translate),
}


class CallRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One checked request for text, with every default filled in.

    Its token counts are not checked yet, because the tokenizer has not run.

    prompts: each with its path in the body, for error messages.
    session: the name of the session in the body; "": it has none.
    priority: requests with a lower number are served first. None: the client set none.
    grammar: the constraint on the output; None: the output is free.
    prediction: the expected output, as text or as ids; None without one, or without drafts.
    text: the detokenizer's options, without the prompt. text.silent: the client wants no output
    (max_tokens 0), only the echo with its log-probabilities.
    max_tokens_param: the client's name of sampling.max_tokens, for error messages.
    shrinks_max_tokens: sampling.max_tokens shrinks to the room that the prompt leaves. False: the
    server refuses the request if there is less room.
    named_tool: the client named the tool that the answer calls.
    ignored, repeated, include, breakpoints: as in Translation.
    """

    route: str
    model: str
    prompts: tuple[tuple[str, Prompt], ...]
    n: int
    sampling: SamplingParams
    grammar: ConstraintRequest | None
    prediction: "TokenizeText | array.array[int] | None"
    text: TextOptions
    max_tokens_param: str
    shrinks_max_tokens: bool
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    cache_salt: str = ""
    session: str = ""
    priority: int | None = None
    named_tool: bool = False
    ignored: tuple[str, ...] = ()
    repeated: dict[str, Any] = {}
    include: tuple[str, ...] = ()
    breakpoints: Breakpoints = Breakpoints()

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    def prompt_questions(self) -> list[Question]:
        """The questions for the token ids of the prompts that are text or a chat."""
        return [Question(p, name) for name, p in self.prompts if isinstance(p, msgspec.Struct)]


class RequestConverter:
    """Validates every body of the API, with the limits and model names of one server."""

    def __init__(self, config: ServerConfig) -> None:
        self.served_names = config.served_names
        self.limits = config.limits
        self._config = config
        self._caches = config.scheduler.cache_type != "naive"
        self._check_sizes = partial(check_sizes, config.limits)

    def read(self, route: str, raw: bytes, facts: ModelFacts) -> CallRequest:
        """The request in the body of a generating route.

        Raises a RequestError; its class, `param` and `limit` name the fault.
        """
        translation = self._translate(route, raw, facts)
        with nesting_limit():
            return self._request(route, translation, facts)

    def read_chat(self, given: Mapping[str, Any], facts: ModelFacts, paths: Paths) -> CallRequest:
        """The request in the plain JSON of a chat. paths: as in Translation."""
        chat = body_of(given, requests.ChatBody, self._check_sizes)
        translation = self._checked(Translation(chat, paths), facts)
        with nesting_limit():
            return self._request(requests.CHAT, translation, facts)

    def _request(self, route: str, translation: Translation, facts: ModelFacts) -> CallRequest:
        body, paths = translation.body, translation.paths
        if body.stream_options is not None and not body.stream:
            raise reject("stream_options", "is allowed only with stream set to true")
        max_tokens, max_tokens_param = body.max_tokens, paths["max_tokens"]
        tools = tools_of(body, facts, paths)
        if isinstance(body, requests.ChatBody):
            if body.top_logprobs and not body.logprobs:
                raise reject("top_logprobs", "is allowed only with logprobs set to true")
            logprobs = body.top_logprobs if body.logprobs else None
            if body.max_completion_tokens is not None:
                max_tokens, max_tokens_param = body.max_completion_tokens, "max_completion_tokens"
            default_tokens, echo, reasoning = None, False, body.separate_reasoning
        else:
            logprobs = body.logprobs
            default_tokens, echo, reasoning = COMPLETIONS_MAX_TOKENS, body.echo, False
        silent = max_tokens == 0
        if silent and not echo:
            raise reject(paths["max_tokens"], "must be at least 1 without echo")
        sampling = self._sampling(
            body,
            facts,
            max_tokens=1 if silent else default_tokens if max_tokens is None else max_tokens,
            logprobs=logprobs,
            prompt_logprobs=logprobs if echo else None,
        )
        grammar = constraint_of(body, self._config.max_json_whitespace, paths)
        refused = ("grammar", "regex") if self._config.no_grammars else ()
        if grammar is not None and grammar.message.kind in refused:
            message = "grammars and regexes are refused here (--no-grammars); use a JSON schema"
            raise Unsupported(message, param=grammar.param)
        if tools is not None:
            grammar = tools.constraint(grammar, self._config.max_json_whitespace)
            continues = isinstance(body, requests.ChatBody) and body.continue_final_message
            if grammar is not None and tools.has_sections and continues:
                param = paths["continue_final_message"]
                raise reject(param, f"cannot be combined with {grammar.param}")
        return CallRequest(
            route=route,
            model=body.model,
            prompts=tuple(self._prompts(translation, facts, tools)),
            n=body.n,
            sampling=sampling,
            grammar=grammar,
            prediction=self._prediction(body, facts),
            text=TextOptions(
                stop=[body.stop] if isinstance(body.stop, str) else body.stop,
                skip_special_tokens=body.skip_special_tokens,
                include_stop=body.include_stop_str_in_output,
                min_tokens=body.min_tokens,
                token_ids=route == requests.GENERATE or body.return_token_ids,
                reasoning=reasoning,
                silent=silent,
                tools=tools and tools.options,
            ),
            max_tokens_param=max_tokens_param,
            shrinks_max_tokens=max_tokens is None or self._shrinks(translation),
            stream=body.stream,
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            echo=echo,
            cache_salt=body.cache_salt,
            session=body.prompt_cache_key or body.session_id,
            priority=body.priority,
            named_tool=tools is not None and tools.is_named,
            ignored=translation.ignored,
            repeated=translation.repeated,
            include=translation.include,
            breakpoints=translation.breakpoints if self._caches else Breakpoints(),
        )

    def _shrinks(self, translation: Translation) -> bool:
        """Whether max_tokens shrinks to the room in the context. Agents send a fixed limit."""
        is_chat = isinstance(translation.body, requests.ChatBody)
        return translation.shrinks_max_tokens or (is_chat and not self._config.strict_max_tokens)

    def read_prompt(self, route: str, raw: bytes, facts: ModelFacts) -> Question:
        """The question for the ids of the prompt in a body of COUNT_TOKENS or INPUT_TOKENS."""
        translation = self._translate(route, raw, facts)
        with nesting_limit():
            chat, paths = translation.body, translation.paths
            assert isinstance(chat, requests.ChatBody), "these routes read chats; this is a bug"
            prompt = self._chat_prompt(chat, facts, tools_of(chat, facts, paths), paths)
            return Question(prompt, paths["messages"])

    def _translate(self, route: str, raw: bytes, facts: ModelFacts) -> Translation:
        """Decode a body of this route, and translate it to a body of OpenAI's chat or completions.

        `ignored` then also has the options of the thinking that the template does not read.
        """
        kind, translate = _BODIES[route]
        given = decode(raw, kind, self._check_sizes, self._config.allow_unknown_params)
        return self._checked(translate(given), facts)

    def _checked(self, translation: Translation, facts: ModelFacts) -> Translation:
        """Check the model, and set the thinking of a chat."""
        body = translation.body
        self.check_model(body.model)
        if not isinstance(body, requests.ChatBody):
            return translation
        ignored = set_thinking(body, facts.template_variables)
        return translation._replace(ignored=(*ignored, *translation.ignored))

    def read_tokenize(self, raw: bytes, facts: ModelFacts) -> tuple[Question, bool]:
        """The question for the ids of the prompt or the messages of a /tokenize body.

        The second value is True if the body asks for the text of each token.
        """
        body = decode(raw, requests.TokenizeBody, self._check_sizes)
        self.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("either prompt or messages is required", param="prompt")
        if body.prompt is not None:
            prompt = self._text_prompt("prompt", body.prompt, facts, body.add_special_tokens)
            return Question(prompt, "prompt"), body.return_token_strs
        messages, options = body.messages or [], body.chat_template_kwargs
        chat = requests.ChatBody(model="", messages=messages, chat_template_kwargs=options)
        with nesting_limit():
            rendered = self._chat_prompt(chat, facts, None)
        return Question(rendered, "messages"), body.return_token_strs

    def read_detokenize(self, raw: bytes, facts: ModelFacts) -> Question:
        """The question for the text of the ids in a body of /detokenize."""
        body = decode(raw, requests.DetokenizeBody, self._check_sizes)
        self.check_model(body.model)
        token_ids = self._ids_prompt("tokens", body.tokens, facts).tobytes()
        return Question(DecodeIds(token_ids=token_ids, skip_special=body.skip_special_tokens))

    def read_abort(self, raw: bytes) -> str:
        """The request id in a body of /abort."""
        return decode(raw, requests.AbortBody, self._check_sizes).request_id

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFound for a name that this server does not serve. None is accepted."""
        if name is not None and name not in self.served_names:
            raise ModelNotFound(f"the model '{name[:128]}' does not exist", param="model")

    def _chat_prompt(
        self,
        chat: requests.ChatBody,
        facts: ModelFacts,
        tools: ToolRequest | None,
        paths: Paths = SAME_PATHS,
    ) -> TokenizeChat:
        """The messages in the form that chat templates expect, with the template's options.

        paths: as in Translation.
        """
        options, end, messages = chat.chat_template_kwargs, ending(chat, paths), chat.messages
        chars, images = prepare_messages(messages, facts.tool_format, paths)
        check_source_images(images, facts, self.limits.max_images)
        self._check_chars(paths["messages"], chars, facts)
        rendered = b"null" if tools is None else tools.rendered
        self._check_chars(paths["tools"], len(rendered), facts)
        if facts.tool_format.startswith("mistral"):
            shorten_ids(messages)
        written = msgspec.json.encode(messages)
        if facts.tool_format == "harmony":
            check_effort(options.reasoning_effort, paths)
            written = msgspec.json.encode(harmony_chat(msgspec.json.decode(written)))
        elif facts.tool_format == "atem":
            written = msgspec.json.encode(atem_chat(msgspec.json.decode(written)))
        return TokenizeChat(
            messages_json=written,
            template_kwargs_json=msgspec.json.encode(msgspec.to_builtins(options) | end),
            tools_json=rendered,
            images=images,
        )

    def _text_prompt(
        self, param: str, text: str, facts: ModelFacts, add_special: bool = True
    ) -> TokenizeText:
        """A prompt that is text. add_special: let the tokenizer add BOS."""
        self._check_chars(param, len(text), facts)
        return TokenizeText(text=text, add_special=add_special)

    def _ids_prompt(self, param: str, ids: list[Any], facts: ModelFacts) -> TokenArray:
        """Return a prompt of token ids as an array.

        Raises PromptTooLong, or InvalidRequest for an id that the model does not know.
        """
        if len(ids) > facts.max_seq_len:
            message = f"{param} has {len(ids)} tokens; the context length is {facts.max_seq_len}"
            raise PromptTooLong(message, param=param)
        try:
            token_ids = array.array("i", ids)
        except TypeError:  # the list also contains text or lists
            token_ids = None
        # `protocol` refuses negative ids, so a check of max() is enough. A loop takes 9 times as
        # long.
        if token_ids is None or max(ids) >= facts.vocab_size:
            known = range(facts.vocab_size)
            index = next(i for i, value in enumerate(ids) if value not in known)
            rule = f"must be a token id from 0 to {facts.vocab_size - 1}"
            raise reject(f"{param}[{index}]", rule)
        return token_ids

    def _prompts(
        self, translation: Translation, facts: ModelFacts, tools: ToolRequest | None
    ) -> list[tuple[str, Prompt]]:
        """Each prompt with its path in the body."""
        body, paths = translation.body, translation.paths
        if isinstance(body, requests.ChatBody):
            return [(paths["messages"], self._chat_prompt(body, facts, tools, paths))]
        if isinstance(body, requests.GenerateBody):
            return [("input_ids", self._ids_prompt("input_ids", body.input_ids, facts))]
        named: list[tuple[str, Any]] = [("prompt", body.prompt)]
        if isinstance(body.prompt, list) and not isinstance(body.prompt[0], int):
            named = [(f"prompt[{index}]", one) for index, one in enumerate(body.prompt)]
        return [(param, self._prompt(param, prompt, facts)) for param, prompt in named]

    def _prompt(self, param: str, prompt: str | int | list[Any], facts: ModelFacts) -> Prompt:
        if isinstance(prompt, str):
            return self._text_prompt(param, prompt, facts)
        if isinstance(prompt, int):
            raise reject(param, "must be text or a list of token ids")
        return self._ids_prompt(param, prompt, facts)

    def _prediction(self, body: requests.GenerationBody, facts: ModelFacts) -> TokenizeText | None:
        if not isinstance(body, requests.ChatBody) or body.prediction is None:
            return None
        content = body.prediction.content
        text = content if isinstance(content, str) else "".join([part.text for part in content])
        prediction = self._text_prompt("prediction", text, facts, add_special=False)
        return prediction if facts.drafts and text else None

    def _check_chars(self, param: str, chars: int, facts: ModelFacts) -> None:
        max_chars = self.limits.max_prompt_chars or _CHARS_PER_CONTEXT_TOKEN * facts.max_seq_len
        if chars > max_chars:
            raise PromptTooLong(
                f"{param} has {chars} characters; at most {max_chars} are accepted for a context "
                f"of {facts.max_seq_len} tokens",
                param=param,
                limit="max_prompt_chars",
            )

    def sampling_defaults(self, facts: ModelFacts) -> dict[str, float]:
        """The value of each sampling parameter in a request that leaves it out."""
        defaults = SamplingParams(**self._model_defaults(facts))
        return {name: getattr(defaults, name) for name in _MODEL_DEFAULTS}

    def _model_defaults(self, facts: ModelFacts) -> dict[str, Any]:
        return {} if self._config.ignore_generation_config else dict(facts.sampling_defaults)

    def _sampling(
        self, body: requests.AnyBody, facts: ModelFacts, **counts: int | None
    ) -> SamplingParams:
        """The sampling parameters of a body. counts: max_tokens, logprobs and prompt_logprobs."""
        values = self._model_defaults(facts)
        for name in _SAME_IN_SAMPLING:
            if (value := getattr(body, name)) is not None:
                values[name] = value
        values |= counts
        sampling = SamplingParams(**values, stop_token_ids=tuple(body.stop_token_ids))
        sampling.validate(facts.vocab_size)
        return sampling
