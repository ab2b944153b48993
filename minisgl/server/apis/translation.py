"""`Translation`: the body of a request as a body of OpenAI's chat or completions."""

from typing import Any, NamedTuple

from minisgl.server.protocol.requests import AnyBody


class Translation(NamedTuple):
    """The body of a request as a body of OpenAI's chat or completions.

    messages    the parameter that holds the messages of a chat, for error messages.
    max_tokens  the parameter that holds max_tokens, for error messages. None: the parameter of the
                OpenAI body that is set.
    ignored     features that the body leaves out, by the label of the metric that counts them.
    repeated    parameters that the answer repeats.
    fits_tokens max_tokens shrinks to the room in the context; otherwise a lack of room is an error.
    """

    body: AnyBody
    messages: str = "messages"
    max_tokens: str | None = None
    ignored: tuple[str, ...] = ()
    repeated: dict[str, Any] = {}
    fits_tokens: bool = False
