"""The loop of a worker of the API server: say ready, answer each message, answer pings in turn."""

from collections.abc import Callable
from types import UnionType
from typing import Any, NoReturn

from minisgl.message import Alive, Ping, Ready, Receiver, Sender, ToApi, endpoint


def serve_queue(
    name: str, socket_dir: str, union: UnionType, answer: Callable[[Any], ToApi | None]
) -> NoReturn:
    """Serve the queue `name` for ever; `answer` may have nothing to say, and never raises."""
    receiver: Receiver[Any] = Receiver(endpoint(socket_dir, name), union)
    api: Sender[ToApi] = Sender(endpoint(socket_dir, "api"))
    api.send(Ready(role=name))
    while True:
        receiver.poll(None)
        for message in receiver.drain():
            found = Alive(role=name) if isinstance(message, Ping) else answer(message)
            if found is not None:
                api.send(found)
