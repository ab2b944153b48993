"""Renders the Jinja chat template of a model in a sandbox, with limits on time and size.

The Jinja environment has the features that Hugging Face templates use: trimmed blocks, loop
controls, `tojson` without escaping, `raise_exception`, `strftime_now`, the `generation` tag.
"""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minisgl.core import InvalidRequest

MAX_TEMPLATE_CHARS = 8 * 2**20  # The server's limit for the rendered text of one chat.
# Marks the end of a message that the model continues. It is a lone surrogate. UTF-8 cannot encode
# one, so no other text that becomes tokens contains it.
_END_MARK = "\ud801"


class TemplateError(InvalidRequest):
    """The chat cannot be rendered."""

    def __init__(self, message: str, limit: str | None = None) -> None:
        super().__init__(message, param="messages", limit=limit)


class _TimeLimitExceeded(BaseException):
    """The template ran too long. A BaseException, so that `except Exception` does not catch it."""


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks output for training. Here it has no effect."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. max_chars: the limit for the length of a rendered chat.

    variables: the names of the variables that the template reads.
    """

    def __init__(self, source: str, special_tokens: dict[str, str], max_chars: float) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        # Jinja's own `tojson` would change the prompt, because it escapes HTML characters.
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        # Jinja's own `safe` marks a text as HTML, and a text that is added to it is then escaped.
        environment.filters["safe"] = str
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        self.source = source
        self._template = environment.from_string(source)
        self.variables = tuple(sorted(meta.find_undeclared_variables(environment.parse(source))))
        self._special_tokens = special_tokens
        self._max_chars = max_chars

    @property
    def standalone(self) -> str:
        """The source, after definitions of the variables that `render` provides.

        Another program can render this text with the messages only.
        """
        given = {"tools": None, "documents": None, **self._special_tokens}
        texts = {n: "none" if v is None else json.dumps(v) for n, v in given.items()}
        sets = [
            f"{{% set {name} = {name} | default({text}) %}}"
            for name, text in texts.items()
            if name in self.variables
        ]
        return "".join(sets) + self.source

    def render(
        self, messages: list[dict[str, Any]], options: dict[str, Any], timeout_s: float | None
    ) -> str:
        """The prompt text of a chat. Raises TemplateError for every failure of the template.

        With the option continue_final_message, the prompt ends with the content of the last
        message, so that the model continues it.
        timeout_s works in the main thread of a process only (it uses SIGALRM); None: no limit.
        """
        variables: dict[str, Any] = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **options,
            **self._special_tokens,
            "messages": messages,
        }
        continues = options.get("continue_final_message")
        if continues:
            # The template writes the end of the message after the mark.
            final = {**messages[-1], "content": messages[-1]["content"] + _END_MARK}
            variables["messages"] = [*messages[:-1], final]
        try:
            with time_limit(timeout_s):
                text = self._collect(variables)
        except _TimeLimitExceeded:
            message = f"the chat template ran longer than {timeout_s:g} s"
            raise TemplateError(message, "template_timeout_s") from None
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise TemplateError(f"the chat template refused this chat: {error}"[:500]) from None
        except (AttributeError, RecursionError, MemoryError) as error:
            raise TemplateError(f"the chat template failed: {type(error).__name__}") from None
        if continues:
            text, found, _ = text.rpartition(_END_MARK)
            if not found:
                message = "the chat template leaves out the last message, so it cannot be continued"
                raise TemplateError(message)
        return text

    def _collect(self, variables: dict[str, Any]) -> str:
        text = ""
        for part in self._template.generate(variables):
            text += part
            if len(text) > self._max_chars:
                message = f"the chat template produced more than {self._max_chars} characters"
                raise TemplateError(message, "max_template_chars")
        return text


@contextmanager
def time_limit(timeout_s: float | None) -> Iterator[None]:
    """Raise _TimeLimitExceeded in the block after `timeout_s`. Calls must not be nested."""
    if timeout_s is None:
        yield
        return
    previous = signal.signal(signal.SIGALRM, _raise_time_limit)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _raise_time_limit(number: int, frame: FrameType | None) -> NoReturn:
    raise _TimeLimitExceeded


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))
