"""The parameters of chat, completions and /generate: one table, one validator.

A parameter is offered (checked and obeyed), harmless (ignored: it does not change the answer), or
not offered (refused unless it has its neutral value). Everything else is unknown, hence refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from minisgl.core import InvalidRequest, Unsupported
from minisgl.server import checks
from minisgl.server.chat import messages_check
from minisgl.server.checks import Check
from minisgl.server.config import Limits
from minisgl.server.errors import ModelNotFound
from minisgl.utils import near_names

CHAT = "chat"
COMPLETIONS = "completions"
GENERATE = "generate"
_INT32 = 2**31 - 1
_MAX_STOP_STRINGS = 16
_MAX_STOP_CHARS = 256
_MAX_STOP_TOKEN_IDS = 128

HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)

# Template variables that a client may set; everything else in a template is the model's business.
TEMPLATE_OPTIONS: dict[str, Check] = {
    "enable_thinking": checks.boolean,
    "thinking": checks.boolean,
    "preserve_thinking": checks.boolean,
    "reasoning_effort": checks.string(max_chars=32),
    "thinking_budget": checks.integer(0, 2**31 - 1),
    "date_string": checks.string(max_chars=64),
    "builtin_tools": checks.list_of(checks.string(max_chars=64), max_items=16),
}


_NEVER = [
    "audio",
    "custom_logit_processor",
    "ebnf",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "prompt_logprobs",
    "regex",
    "stop_regex",
    "structured_outputs",
    "truncate_prompt_tokens",
    "web_search_options",
]
# Understood, but refused unless the value is one of these (or null), which ask for nothing.
NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys((*_NEVER, "chat_template", "reasoning_effort"), ()),
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "priority": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
}
_WHY = {
    "chat_template": "cannot be set by a request",
    "reasoning_effort": "is not supported; see chat_template_kwargs",
    "tools": 'is supported with "tool_choice": "none" only',
}


def _model(served: Sequence[str]) -> Check:
    def check(param: str, value: Any) -> str:
        name = str(checks.string()(param, value))
        if name not in served:
            raise ModelNotFound(f"the model '{name[:128]}' does not exist", param=param)
        return name

    return Check(check, {"type": "string", "enum": list(served)})


def _stop() -> Check:
    one = checks.string(_MAX_STOP_CHARS, empty=False, limit="max_stop_chars")
    many = checks.list_of(one, _MAX_STOP_STRINGS, limit="max_stop_strings")

    def check(param: str, value: Any) -> list[str]:
        return [one(param, value)] if isinstance(value, str) else list(many(param, value))

    return Check(check, {"anyOf": [one.schema, many.schema]})


def _logit_bias(limits: Limits) -> Check:
    value_of = checks.number(-100, 100)

    def check(param: str, value: Any) -> dict[int, float]:
        given = checks.json_object(param, value)
        if len(given) > limits.max_logit_bias:
            most = f"must have at most {limits.max_logit_bias} entries"
            raise checks.reject(param, most, "max_logit_bias")
        bias: dict[int, float] = {}
        for name, entry in given.items():
            if not (name.isascii() and name.isdigit() and len(name) < 10):
                raise checks.reject(param, "must have token ids as keys")
            bias[int(name)] = value_of(f"{param}.{name}", entry)
        return bias

    return Check(
        check,
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": value_of.schema,
            "maxProperties": limits.max_logit_bias,
        },
    )


STREAM_OPTIONS = dict.fromkeys(("include_usage", "include_obfuscation"), checks.boolean)


# Prompts have a reader of their own, in `requests`: they depend on the model.
TEXT_PROMPT = Check(checks.as_is, {"type": "string", "minLength": 1})
IDS_PROMPT = Check(
    checks.as_is, {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
)


class ParamTable:
    """The offered parameters with their checks under these limits, and the validator."""

    def __init__(
        self, limits: Limits, models: Sequence[str] = (), allow_unknown: bool = False
    ) -> None:
        self._allow_unknown = allow_unknown
        self.model = _model(models)
        tokens, penalty = checks.integer(1, _INT32), checks.number(-2, 2)
        most_logprobs = checks.integer(0, limits.max_logprobs, "max_logprobs")
        token_id = checks.integer(0, _INT32)
        shared: dict[str, Check] = {
            "model": self.model,
            "max_tokens": tokens,
            "temperature": checks.number(0, 2),
            "top_p": checks.number(0, 1, above=True),
            "top_k": checks.integer(-1, _INT32),
            "min_p": checks.number(0, 1),
            "seed": checks.integer(),
            "n": checks.integer(1, limits.max_choices, "max_n"),
            "stop": _stop(),
            "stop_token_ids": checks.list_of(
                token_id, _MAX_STOP_TOKEN_IDS, limit="max_stop_token_ids"
            ),
            "min_tokens": checks.integer(0, _INT32),
            "ignore_eos": checks.boolean,
            "frequency_penalty": penalty,
            "presence_penalty": penalty,
            "repetition_penalty": checks.number(0.01, 100),
            "logit_bias": _logit_bias(limits),
            "stream": checks.boolean,
            "stream_options": checks.fields(STREAM_OPTIONS),
            "skip_special_tokens": checks.boolean,
            "include_stop_str_in_output": checks.boolean,
            "return_token_ids": checks.boolean,
            "cache_salt": checks.string(max_chars=128),
        }
        plain = {**shared, "max_tokens": checks.integer(0, _INT32), "logprobs": most_logprobs}
        plain["echo"] = checks.boolean
        self.offered: dict[str, dict[str, Check]] = {
            CHAT: {
                **shared,
                "messages": messages_check(limits.max_messages),
                "max_completion_tokens": tokens,
                "chat_template_kwargs": checks.fields(TEMPLATE_OPTIONS),
                "logprobs": checks.boolean,
                "top_logprobs": most_logprobs,
                "separate_reasoning": checks.boolean,
            },
            COMPLETIONS: {**plain, "prompt": _prompts(limits.max_choices)},
            GENERATE: {**plain, "input_ids": IDS_PROMPT},
        }

    def validate(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The offered parameters that were given, checked one by one; null counts as not given.

        Raises InvalidRequest or Unsupported that names the parameter.
        """
        offered = self.offered[route]
        given: dict[str, Any] = {}
        for name, value in body.items():
            check = offered.get(name)
            if check is None:
                self._refuse_unless_harmless(route, name, value, body)
            elif value is not None:
                given[name] = check(name, value)
        return given

    def _refuse_unless_harmless(
        self, route: str, name: str, value: Any, body: Mapping[str, Any]
    ) -> None:
        if name in HARMLESS:
            return
        if name in NOT_OFFERED:
            if not _asks_for_nothing(name, value, body):
                raise Unsupported(f"{name} {_WHY.get(name, 'is not supported')}", param=name)
            return
        if self._allow_unknown:
            return
        known = {*self.offered[route], *HARMLESS, *NOT_OFFERED}
        shown = name[:64].encode("utf-8", "replace").decode()
        text = f"unknown parameter '{shown}'{near_names(shown, known)}"
        raise InvalidRequest(text, param=shown, code="unknown_parameter")


def _asks_for_nothing(name: str, value: Any, body: Mapping[str, Any]) -> bool:
    if name == "tools" and body.get("tool_choice") == "none":
        return isinstance(value, list)
    # `1 == True`, and a client that says so does not mean the number.
    same = (value == v and _kind(value) is _kind(v) for v in NOT_OFFERED[name])
    return value is None or any(same)


def _kind(value: Any) -> type:
    return float if type(value) is int else type(value)


def _prompts(max_prompts: int) -> Check:
    one = [TEXT_PROMPT.schema, IDS_PROMPT.schema]
    many = {"type": "array", "items": {"anyOf": one}, "minItems": 1, "maxItems": max_prompts}
    return Check(checks.as_is, {"anyOf": [*one, many]})
