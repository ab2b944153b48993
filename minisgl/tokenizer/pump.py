"""The loop of a worker of the API server: say ready, answer each message, answer pings in turn."""

from collections.abc import Callable
from types import UnionType
from typing import Any, NoReturn

from minisgl.message import Receiver, Sender, endpoint, wire


def serve_queue(
    name: str, socket_dir: str, union: UnionType, answer: Callable[[Any], wire.ToApi | None]
) -> NoReturn:
    """Serve the queue `name` for ever; `answer` may have nothing to say, and never raises."""
    receiver: Receiver[Any] = Receiver(endpoint(socket_dir, name), union)
    api: Sender[wire.ToApi] = Sender(endpoint(socket_dir, "api"))
    api.send(wire.Ready(role=name))
    while True:
        receiver.poll(None)
        for message in receiver.drain():
            found = wire.Alive(role=name) if isinstance(message, wire.Ping) else answer(message)
            if found is not None:
                api.send(found)
