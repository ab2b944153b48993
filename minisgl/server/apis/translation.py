"""`Translation`: the body of a request as a body of OpenAI's chat or completions."""

from typing import Any, NamedTuple

from minisgl.server.protocol.requests import AnyBody


class Translation(NamedTuple):
    """The body of a request as a body of OpenAI's chat or completions.

    messages    the parameter of the request with the messages of a chat, for error messages.
    max_tokens  the same for max_tokens. None: max_tokens or max_completion_tokens, as `body` sets.
    ignored     features of the request that `body` leaves out, as labels of the metric.
    repeated    parameters that the answer repeats.
    fits_tokens max_tokens shrinks to the room in the context; otherwise a lack of room is an error.
    """

    body: AnyBody
    messages: str = "messages"
    max_tokens: str | None = None
    ignored: tuple[str, ...] = ()
    repeated: dict[str, Any] = {}
    fits_tokens: bool = False
