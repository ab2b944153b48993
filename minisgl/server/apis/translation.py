"""`Translation`: a request of another API as a chat."""

from typing import Any, NamedTuple

from minisgl.server.protocol.requests import ChatBody


class Translation(NamedTuple):
    """A request of another API as a chat.

    prompt    the parameter that holds the messages, for error messages.
    ignored   features that the chat leaves out, by the label of the metric that counts them.
    repeated  parameters that the answer repeats.
    """

    chat: ChatBody
    prompt: str
    ignored: tuple[str, ...] = ()
    repeated: dict[str, Any] = {}
