"""`RequestMaker`: makes the requests of an LLM from its arguments, with the server's converter."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from minisgl.core import EngineConfig, Grammar, InvalidRequest, SamplingParams, SchedulerConfig
from minisgl.core.sampling import CONSTRAINTS, MAX_JSON_WHITESPACE
from minisgl.llm import inputs
from minisgl.llm.images import with_data_urls
from minisgl.llm.local import LocalEngine
from minisgl.message.messages import TextOptions, TokenizeChat
from minisgl.protocol.requests import COMPLETIONS, CompletionBody
from minisgl.request.constraints import ConstraintRequest, constraint_of
from minisgl.request.convert import CallRequest, RequestConverter
from minisgl.request.paths import Paths
from minisgl.settings.config import Limits, ServerConfig

_MODEL = "offline"
_FREE: Mapping[str, Any] = dict.fromkeys(CONSTRAINTS)
_PATHS = Paths({field: name for name, field in inputs.CONSTRAINT_FIELDS.items()})
# A program may send itself as much as the memory holds.
LIMITS = Limits(
    max_prompt_chars=sys.maxsize,
    max_choices=sys.maxsize,
    max_messages=sys.maxsize,
    max_call_tokens=sys.maxsize,
    max_images=sys.maxsize,
    max_request_pixels=sys.maxsize,
    image_timeout_s=600.0,
)


def offline_config(engine: EngineConfig, scheduler: SchedulerConfig) -> ServerConfig:
    """Return the configuration of an LLM, as its ranks and the server's converter take it."""
    return ServerConfig(
        engine=engine,
        scheduler=scheduler,
        served_names=(_MODEL,),
        limits=LIMITS,
        log_level="warning",
    )


class RequestMaker:
    """Makes requests with one prompt and n answers each."""

    def __init__(self, config: ServerConfig, engine: LocalEngine) -> None:
        """config: of `offline_config`. engine: has the facts of the model."""
        self._engine = engine
        self._converter = RequestConverter(config)

    def prompts(
        self,
        prompts: Sequence[inputs.Prompt],
        params: Sequence[SamplingParams],
        n: int,
        stop: inputs.Stop,
        priority: inputs.Priority = 0,
        prediction: inputs.Prediction = None,
        at_end: bool = False,
    ) -> list[CallRequest]:
        """The requests for these prompts. at_end: as in TextOptions. Raises InvalidRequest."""
        inputs.check_count(n)
        stops = inputs.stop_list(stop)
        priorities = inputs.priority_list(priority, len(prompts))
        predictions = self._predictions(prediction, len(prompts))
        grammars: dict[int, ConstraintRequest | None] = {}  # Many prompts share their parameters.
        for each in params:
            if id(each) not in grammars:
                grammars[id(each)] = self._grammar(each)
        return [
            CallRequest(
                route=COMPLETIONS,
                model=_MODEL,
                prompts=(("prompt", inputs.as_prompt(prompt)),),
                n=n,
                sampling=_free(sampling),
                grammar=grammars[id(sampling)],
                prediction=expected,
                text=TextOptions(
                    stop=stops, min_tokens=sampling.min_tokens, token_ids=True, at_end=at_end
                ),
                max_tokens_param="max_tokens",
                shrinks_max_tokens=False,
                priority=number,
            )
            for prompt, sampling, number, expected in zip(
                prompts, params, priorities, predictions, strict=True
            )
        ]

    def chats(
        self,
        chats: Sequence[inputs.Conversation],
        params: Sequence[SamplingParams],
        n: int,
        stop: inputs.Stop,
        prediction: inputs.Prediction,
        template_options: Any,
        tools: Sequence[dict[str, Any]],
        tool_choice: str | dict[str, Any] | None,
    ) -> list[CallRequest]:
        """The requests for these chats. Raises InvalidRequest or Unsupported."""
        inputs.check_count(n)
        stops, options = inputs.stop_list(stop), inputs.checked_options(template_options)
        predictions = self._predictions(prediction, len(chats))
        requests = []
        for chat, sampling, expected in zip(chats, params, predictions, strict=True):
            inputs.check_conversation(chat)
            given: dict[str, Any] = {
                "model": _MODEL,
                "messages": with_data_urls([*chat]),
                "n": n,
                "tools": list(tools),
            }
            if tool_choice is not None:
                given["tool_choice"] = tool_choice
            given |= inputs.constraint_fields(sampling)
            try:
                request = self._converter.read_chat(given, self._engine.facts, _PATHS)
                ((name, prompt),) = request.prompts
                assert isinstance(prompt, TokenizeChat), "the prompt must be a chat; this is a bug"
                rendered = msgspec.json.decode(prompt.template_kwargs_json) | options
                prompt = msgspec.structs.replace(
                    prompt, template_kwargs_json=msgspec.json.encode(rendered)
                )
            except UnicodeEncodeError:
                message = "the text must not have a lone surrogate"
                raise InvalidRequest(message, param="messages") from None
            except TypeError as error:
                message = f"template_options is not JSON: {error}"
                raise InvalidRequest(message, param="template_options") from None
            text = msgspec.structs.replace(
                request.text,
                stop=stops,
                min_tokens=sampling.min_tokens,
                token_ids=True,
                at_end=not stops,
            )
            requests.append(
                msgspec.structs.replace(
                    request,
                    prompts=((name, prompt),),
                    sampling=_free(sampling),
                    prediction=expected,
                    text=text,
                    shrinks_max_tokens=False,
                )
            )
        return requests

    def _predictions(self, prediction: inputs.Prediction, count: int) -> list[Any]:
        found = inputs.prediction_list(prediction, count)
        return found if self._engine.worker.facts.drafts else [None] * count

    def _grammar(self, sampling: SamplingParams) -> ConstraintRequest | None:
        fields = inputs.constraint_fields(sampling)
        if not fields:
            return None
        body = CompletionBody(model=_MODEL, prompt="", **fields)
        return constraint_of(body, MAX_JSON_WHITESPACE, _PATHS)


def _free(sampling: SamplingParams) -> SamplingParams:
    """The parameters without their constraint, which is the grammar of the request."""
    if isinstance(sampling.grammar, Grammar) or not inputs.constraint_name(sampling):
        return sampling
    return msgspec.structs.replace(sampling, **_FREE)
