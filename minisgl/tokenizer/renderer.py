"""Renders the Jinja chat template of a model in a sandbox.

The Jinja environment has the features that Hugging Face templates use: trimmed blocks, loop
controls, `tojson` without escaping, `raise_exception`, `strftime_now`, the `generation` tag.
"""

import json
import traceback
from datetime import datetime
from functools import cached_property, partial
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minisgl.core import InvalidRequest

# Marks the end of a message that the model continues. It is a lone surrogate. UTF-8 cannot encode
# one, so no other text that becomes tokens contains it.
_END_MARK = "\ud801"


class TemplateError(InvalidRequest):
    """The template cannot be loaded, or it cannot render the chat."""

    def __init__(self, message: str, limit: str | None = None) -> None:
        super().__init__(message, param="messages", limit=limit)


class RenderResult(msgspec.Struct, array_like=True, omit_defaults=True):
    """The reply of `TemplateRenderer.handle`.

    text       the prompt text of a chat in UTF-8, which may have lone surrogates.
    variables  the names of the variables that a loaded template reads.
    error      the message of a TemplateError. limit: its limit.
    bug        the traceback of an unexpected exception.
    """

    text: bytes = b""
    variables: tuple[str, ...] = ()
    error: str | None = None
    limit: str | None = None
    bug: str | None = None


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks output for training. Here it has no effect."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateRenderer:
    """One chat template. It compiles at its first use, because Jinja computes constants then.

    max_chars: the limit for the length of a rendered chat.
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
        self._environment = environment
        self._source = source
        self._special_tokens = special_tokens
        self._max_chars = max_chars

    def handle(self, request: bytes) -> bytes:
        """Load the template (b""), or render a chat: the JSON array [messages, options].

        Returns an encoded RenderResult. JSON, because messages have numbers and lone surrogates
        that MessagePack cannot hold.
        """
        try:
            if request:
                text = self.render(*json.loads(request))
                result = RenderResult(text=text.encode("utf-8", "surrogatepass"))
            else:
                result = RenderResult(variables=self.load())
        except TemplateError as error:
            message = error.message.encode("utf-8", "replace").decode()
            result = RenderResult(error=message, limit=error.limit)
        except MemoryError:  # a limit of the process, which ends
            raise
        except Exception:  # noqa: BLE001  # The owner logs it, and only its request ends.
            result = RenderResult(bug=traceback.format_exc())
        return msgspec.msgpack.encode(result)

    def load(self) -> tuple[str, ...]:
        """Compile. Return the names of the variables. Raises TemplateError for a wrong template."""
        try:
            return self._compiled[1]
        except jinja2.TemplateError as error:
            raise TemplateError(str(error)) from None
        # Jinja and Python's compiler raise these for a template that they cannot compile.
        except (ArithmeticError, RecursionError, SyntaxError, TypeError, ValueError) as error:
            raise TemplateError(f"{type(error).__name__}: {error}") from None

    @cached_property
    def _compiled(self) -> tuple[jinja2.Template, tuple[str, ...]]:
        environment = self._environment
        parsed = environment.parse(self._source)
        variables = tuple(sorted(meta.find_undeclared_variables(parsed)))
        code, names = environment.compile(parsed), environment.make_globals(None)
        return jinja2.Template.from_code(environment, code, names), variables

    def render(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
        """The prompt text of a chat. Raises TemplateError for every failure of the template.

        With the option continue_final_message, the prompt ends with the content of the last
        message, so that the model continues it.
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
            text = self._collect(variables)
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise TemplateError(f"the chat template refused this chat: {error}"[:500]) from None
        except (AttributeError, RecursionError) as error:
            raise TemplateError(f"the chat template failed: {type(error).__name__}") from None
        if continues:
            text, found, _ = text.rpartition(_END_MARK)
            if not found:
                message = "the chat template leaves out the last message, so it cannot be continued"
                raise TemplateError(message)
        return text

    def _collect(self, variables: dict[str, Any]) -> str:
        text = ""
        for part in self._compiled[0].generate(variables):
            text += part
            if len(text) > self._max_chars:
                message = f"the chat template produced more than {self._max_chars} characters"
                raise TemplateError(message, "max_template_chars")
        return text


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))
