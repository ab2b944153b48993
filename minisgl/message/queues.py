"""Typed one-way ZMQ queues over ipc sockets. Only this module and publisher.py import zmq.

Sockets have no high-water mark, so that no sender blocks. The scheduler must never block. The API
server bounds the number of queued messages, because it limits the number of admitted requests. A
receiver logs and drops a message that it cannot decode.

The socket folder has a file with a key. The processes of the service read this key, and each
message begins with it. A receiver drops messages without the key, so a well-formed message from
outside the service, such as a Shutdown, has no effect. The key does not protect the service from
processes of the same user. They can read the key, and they could also kill the service.
"""

import hmac
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from minisgl.core import InvalidRequest
from minisgl.utils import SOCKET_KEY, log_event

logger = logging.getLogger(__name__)

T = TypeVar("T")


def endpoint(directory: str, name: str) -> str:
    """Return the address of queue `name` in the private socket directory."""
    return f"ipc://{directory}/{name}"


def _key_of(address: str) -> bytes:
    """Return the key that `socket_folder` has written to the folder of this address."""
    return Path(address.removeprefix("ipc://")).with_name(SOCKET_KEY).read_bytes()


class Sender(Generic[T]):
    """The sending end of a queue. `send` neither blocks nor raises for a slow or absent peer."""

    def __init__(self, address: str, linger_ms: int = 0) -> None:
        """linger_ms: longest time in which `close_queues` still delivers queued messages."""
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, linger_ms)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._frame = bytearray(_key_of(address))
        self._key_bytes = len(self._frame)

    def send(self, message: T) -> int:
        """Queue one message, even if no receiver is bound yet. Returns its size in bytes."""
        self._encoder.encode_into(message, self._frame, self._key_bytes)
        return self._send_frame()

    def send_encoded(self, data: bytes) -> int:
        """As `send`. data: the message, encoded with msgpack."""
        self._frame[self._key_bytes :] = data
        return self._send_frame()

    def _send_frame(self) -> int:
        self._socket.send(self._frame, zmq.DONTWAIT, copy=True)
        return len(self._frame)

    def close(self) -> None:
        self._socket.close()


def send_to_all(senders: Iterable[Sender[T]], message: T) -> None:
    """Queue one message in several queues. It is encoded once."""
    data = msgspec.msgpack.encode(message)
    for sender in senders:
        sender.send_encoded(data)


def close_queues() -> None:
    """Close the queues of this process, except AsyncReceivers, and deliver the last messages.

    The end of a process drops queued messages, also those of closed Senders. This function waits
    for the Senders with a linger time, at most this time.
    """
    zmq.Context.instance().destroy()


class _Reader(Generic[T]):
    """The receiving end of a queue. It binds the address."""

    def __init__(self, address: str, union: type[T] | UnionType) -> None:
        self._socket = self._context().socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._decoder = msgspec.msgpack.Decoder(union)
        self._key = _key_of(address)

    def _context(self) -> zmq.Context[Any]:
        return zmq.Context.instance()

    def _decode(self, frame: bytes) -> T | None:
        """Return the message. If the key is wrong or decoding fails, log this and return None."""
        key, data = frame[: len(self._key)], memoryview(frame)[len(self._key) :]
        if not hmac.compare_digest(key, self._key):
            log_event(logger, logging.WARNING, "foreign message dropped", bytes=len(frame))
            return None
        try:
            message: T = self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, InvalidRequest) as error:
            log_event(logger, logging.WARNING, "message dropped", bytes=len(frame), error=error)
            return None
        return message

    def close(self) -> None:
        self._socket.close(linger=0)


class Receiver(_Reader[T]):
    """The receiving end in a process without an event loop."""

    def poll(self, timeout_s: float | None) -> bool:
        """Wait for a message. Returns False if none arrives within `timeout_s`.

        timeout_s: rounded down to whole milliseconds; None waits without a limit.
        """
        return bool(self._socket.poll(None if timeout_s is None else int(timeout_s * 1000)))

    def drain(self) -> Iterator[T]:
        """Yield all messages that have arrived, without waiting for more."""
        while True:
            try:
                frame = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            message = self._decode(frame)
            if message is not None:
                yield message


class AsyncReceiver(_Reader[T]):
    """The receiving end in a process with an asyncio event loop."""

    def _context(self) -> zmq.Context[Any]:
        import zmq.asyncio  # imports asyncio, which no other process needs

        return zmq.asyncio.Context.instance()

    async def recv(self) -> T:
        """Wait for the next message that can be decoded."""
        while True:
            message = self._decode(await self._socket.recv())
            if message is not None:
                return message
