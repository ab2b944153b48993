"""Distributes tokenize requests over the tokenizer processes. Clients take turns."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from minisgl.message.messages import TokenizeChat, TokenizeRequest, TokenizeResult, ToTokenizer
from minisgl.utils.turns import Turns

# A request that has been sent to a tokenizer process cannot be withdrawn. A process therefore gets
# new requests only while its unfinished ones have fewer bytes than this. The other requests wait in
# the pool, which removes a request when its call ends. A request with more bytes is long; a process
# that works on one has no room.
_QUEUED_BYTES = 2**16

Result = asyncio.Future[TokenizeResult]


@dataclass(eq=False, frozen=True, slots=True)
class _Waiting:
    """A request of a client, with its size in bytes and its result."""

    request: TokenizeRequest
    size: int
    result: Result


class _Line:
    """The requests of one kind: those that wait, and the bytes of those sent to each process.

    Within a client, requests are sent in order, except that a short request passes long ones that
    wait for a process.
    """

    def __init__(self, num_processes: int, num_long: int) -> None:
        """num_long: the processes that may have long requests, from the first one on."""
        self.waiting: Turns[_Waiting] = Turns()
        self.sent = [0] * num_processes
        self._num_long = num_long

    def take(self) -> tuple[_Waiting, int] | None:
        """Take out the next request for which a process has room, with the least busy process."""
        if min(self.sent) >= _QUEUED_BYTES:
            return None
        entry = self.waiting.take(self._has_room)
        return None if entry is None else (entry, self._process(entry))

    def _has_room(self, client: str, entry: _Waiting) -> bool:
        # If the call has ended, the event loop has yet to run the callback that removes the entry.
        return not entry.result.done() and self.sent[self._process(entry)] < _QUEUED_BYTES

    def _process(self, entry: _Waiting) -> int:
        """The least busy process that may have a request."""
        is_long = entry.size > _QUEUED_BYTES
        allowed = self.sent[: self._num_long] if is_long else self.sent
        return allowed.index(min(allowed))


class TokenizerPool:
    """The tokenizer processes, with a line of texts and one of chats with images.

    If there are several processes, the last one gets no long texts, so that a short text never
    waits behind a long one.

    A process makes the ids of a text while it waits for the images of a chat, so texts do not wait
    for images. It decodes the images of one chat at a time: each of these chats counts as long,
    because the size of a file does not bound the time of its decoding.

    Each send function queues a message to one process and returns its size in bytes.
    """

    def __init__(self, send_functions: Sequence[Callable[[ToTokenizer], int]]) -> None:
        self._send_functions = send_functions
        self._uids = itertools.count(1)
        count = len(send_functions)
        self._texts, self._images = _Line(count, max(1, count - 1)), _Line(count, count)
        # By uid: line, process, bytes, result.
        self._sent: dict[int, tuple[_Line, int, int, Result]] = {}

    def submit(self, request: TokenizeRequest, client: str) -> Result:
        """Queue a request of a client. Cancelling the returned future withdraws it."""
        result: Result = asyncio.get_running_loop().create_future()
        line = self._images if _has_images(request) else self._texts
        entry = _Waiting(request, _size(request), result)
        line.waiting.add(client, entry)
        result.add_done_callback(lambda done: line.waiting.remove(client, entry))
        self._dispatch(line)
        return result

    def receive(self, message: TokenizeResult) -> int:
        """Complete the future of this result, unless its call has ended. Returns the process."""
        line, process, size, result = self._sent.pop(message.uid)
        line.sent[process] -= size
        self._dispatch(line)
        if not result.done():
            result.set_result(message)
        return process

    def _dispatch(self, line: _Line) -> None:
        """Send waiting requests of a line while a process has room for one."""
        while (found := line.take()) is not None:
            entry, process = found
            uid = next(self._uids)
            message = msgspec.structs.replace(entry.request, uid=uid)
            size = max(self._send_functions[process](message), entry.size)
            line.sent[process] += size
            self._sent[uid] = line, process, size, entry.result


def _has_images(request: TokenizeRequest) -> bool:
    return isinstance(request, TokenizeChat) and bool(request.images)


def _size(request: TokenizeRequest) -> int:
    """The size of a request: the length of its longest text or bytes, and of all images."""
    if isinstance(request, TokenizeChat) and request.images:
        return _QUEUED_BYTES + sum(len(image.data) for image in request.images)
    fields = msgspec.structs.astuple(request)
    return max(len(value) for value in fields if isinstance(value, (str, bytes)))
