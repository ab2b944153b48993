"""`Translation`: the body of a request as a body of OpenAI's chat or completions."""

from typing import Any, NamedTuple

from minisgl.core import ModelFacts
from minisgl.server.protocol.requests import AnyBody, TemplateOptions


class Translation(NamedTuple):
    """The body of a request as a body of OpenAI's chat or completions.

    messages    the parameter that holds the messages of a chat, for error messages.
    ignored     features that the body leaves out, by the label of the metric that counts them.
    repeated    parameters that the answer repeats.
    fits_tokens max_tokens shrinks to the room in the context; otherwise a lack of room is an error.
    """

    body: AnyBody
    messages: str = "messages"
    ignored: tuple[str, ...] = ()
    repeated: dict[str, Any] = {}
    fits_tokens: bool = False


def template_options(facts: ModelFacts, **wanted: Any) -> tuple[TemplateOptions, tuple[str, ...]]:
    """The options that the chat template of the model knows, and the names of the others.

    wanted: None stands for an option that the request does not set.
    """
    given = {name: value for name, value in wanted.items() if value is not None}
    known = {name: value for name, value in given.items() if name in facts.template_variables}
    return TemplateOptions(**known), tuple(name for name in given if name not in known)
