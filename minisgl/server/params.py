"""The parameters of /v1/chat/completions and /v1/completions: one table, one validator.

A parameter is offered (checked and obeyed), harmless (ignored: it does not change the answer), or
not offered (refused unless it has its neutral value). Everything else is unknown, hence refused.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from minisgl.core import InvalidRequest, Unsupported
from minisgl.server import checks
from minisgl.server.checks import Check
from minisgl.server.config import Limits
from minisgl.utils import near_names

__all__ = ["CHAT", "COMPLETIONS", "HARMLESS", "NOT_OFFERED", "TEMPLATE_OPTIONS", "ParamTable"]

CHAT = "chat"
COMPLETIONS = "completions"

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


class _NotOffered(NamedTuple):
    """Understood, but refused unless `neutral` says that it asks for nothing."""

    neutral: Callable[[Any], bool]
    why: str = "is not supported"


def _one_of(*values: Any) -> Callable[[Any], bool]:
    # `1 == True`, and a client that says so does not mean the number.
    return lambda value: any(type(value) is type(v) and value == v for v in values)


def _zero(value: Any) -> bool:
    return type(value) in (int, float) and value == 0


def _one(value: Any) -> bool:
    return type(value) in (int, float) and value == 1


def _never(value: Any) -> bool:
    return False


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
_IF_FALSE = [
    "continue_final_message",
    "logprobs",
    "return_token_ids",
    "separate_reasoning",
    "use_beam_search",
]
_IF_ZERO = ["frequency_penalty", "presence_penalty", "priority", "top_logprobs"]
_IF_ONE = ["best_of", "length_penalty", "repetition_penalty"]
_IF_EMPTY_LIST = ["allowed_token_ids", "bad_words", "documents", "functions"]

NOT_OFFERED: dict[str, _NotOffered] = {
    **dict.fromkeys(_NEVER, _NotOffered(_never)),
    **dict.fromkeys(_IF_FALSE, _NotOffered(_one_of(False))),
    **dict.fromkeys(_IF_ZERO, _NotOffered(_zero)),
    **dict.fromkeys(_IF_ONE, _NotOffered(_one)),
    **dict.fromkeys(_IF_EMPTY_LIST, _NotOffered(_one_of([]))),
    "add_generation_prompt": _NotOffered(_one_of(True)),
    "cache_salt": _NotOffered(_one_of("")),
    "chat_template": _NotOffered(_never, "cannot be set by a request"),
    "function_call": _NotOffered(_one_of("none")),
    "logit_bias": _NotOffered(_one_of({})),
    "modalities": _NotOffered(_one_of(["text"])),
    "reasoning_effort": _NotOffered(_never, "is not supported; see chat_template_kwargs"),
    "response_format": _NotOffered(_one_of({"type": "text"})),
    "suffix": _NotOffered(_one_of("")),
    "tool_choice": _NotOffered(_one_of("none", "auto")),
    "tools": _NotOffered(_one_of([]), 'is supported with "tool_choice": "none" only'),
}


def _stop(limits: Limits) -> Check:
    one = checks.string(max_chars=limits.max_stop_chars, empty=False)
    many = checks.list_of(one, limits.max_stop_strings)

    def check(param: str, value: Any) -> list[str]:
        return [one(param, value)] if isinstance(value, str) else list(many(param, value))

    return check


def _stream_options(param: str, value: Any) -> dict[str, bool]:
    options = checks.json_object(param, value)
    for name, flag in options.items():
        if name not in ("include_usage", "include_obfuscation"):
            raise InvalidRequest(
                f"{param} has an unknown entry{near_names(name, ['include_usage'])}", param=param
            )
        checks.boolean(f"{param}.{name}", flag)
    return options


def _template_kwargs(param: str, value: Any) -> dict[str, Any]:
    checked = {}
    for name, entry in checks.json_object(param, value).items():
        check = TEMPLATE_OPTIONS.get(name)
        if check is None:
            hint = near_names(name, TEMPLATE_OPTIONS)
            raise Unsupported(
                f"{param} has an entry that cannot be set by a request{hint}; "
                f"known are {', '.join(TEMPLATE_OPTIONS)}",
                param=param,
            )
        checked[name] = check(f"{param}.{name}", entry)
    return checked


class ParamTable:
    """The offered parameters with their checks under these limits, and the validator."""

    def __init__(self, limits: Limits, allow_unknown: bool = False) -> None:
        self._allow_unknown = allow_unknown
        tokens = checks.integer(1, 2**31 - 1)
        shared: dict[str, Check] = {
            "model": checks.string(max_chars=512),
            "max_tokens": tokens,
            "temperature": checks.number(0, 2),
            "top_p": checks.number(0, 1, above=True),
            "top_k": checks.integer(-1, 2**31 - 1),
            "min_p": checks.number(0, 1),
            "seed": checks.integer(),
            "n": checks.integer(1, limits.max_n),
            "stop": _stop(limits),
            "stop_token_ids": checks.list_of(
                checks.integer(0, 2**31 - 1), limits.max_stop_token_ids
            ),
            "min_tokens": checks.integer(0, 2**31 - 1),
            "ignore_eos": checks.boolean,
            "stream": checks.boolean,
            "stream_options": _stream_options,
            "skip_special_tokens": checks.boolean,
            "include_stop_str_in_output": checks.boolean,
        }
        self._offered: dict[str, dict[str, Check]] = {
            CHAT: {
                **shared,
                "messages": _as_it_is,
                "max_completion_tokens": tokens,
                "chat_template_kwargs": _template_kwargs,
            },
            COMPLETIONS: {**shared, "prompt": _as_it_is, "echo": checks.boolean},
        }

    def names(self, route: str) -> frozenset[str]:
        """The parameters that this route obeys."""
        return frozenset(self._offered[route])

    def validate(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The offered parameters that were given, checked one by one; null counts as not given.

        Raises InvalidRequest or Unsupported that names the parameter.
        """
        offered = self._offered[route]
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
        if name in HARMLESS or self._is_neutral(name, value, body):
            return
        rule = NOT_OFFERED.get(name)
        if rule is not None:
            raise Unsupported(f"{name} {rule.why}", param=name)
        if self._allow_unknown:
            return
        known = {*self._offered[route], *HARMLESS, *NOT_OFFERED}
        shown = name[:64].encode("utf-8", "replace").decode()
        raise InvalidRequest(
            f"unknown parameter '{shown}'{near_names(shown, known)}",
            param=shown,
            code="unknown_parameter",
        )

    @staticmethod
    def _is_neutral(name: str, value: Any, body: Mapping[str, Any]) -> bool:
        rule = NOT_OFFERED.get(name)
        if rule is None:
            return False
        if name == "tools" and body.get("tool_choice") == "none":
            return isinstance(value, list)
        return value is None or rule.neutral(value)


def _as_it_is(param: str, value: Any) -> Any:
    """Messages and prompts have a reader of their own."""
    return value
