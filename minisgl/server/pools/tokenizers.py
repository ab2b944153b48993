"""Distributes tokenize requests over the tokenizer processes. Clients take turns."""

import asyncio
import itertools
from collections.abc import Callable, Sequence

import msgspec

from minisgl.message.messages import TokenizeChat, TokenizeRequest, TokenizeResult, ToTokenizer

# A request that has been sent to a tokenizer process cannot be withdrawn. A process therefore gets
# new requests only while its unfinished ones have fewer bytes than this. The other requests wait in
# the pool, which removes a request when its call ends. A request with more bytes is long; a process
# that works on one has no room. A request with images is long, because decoding takes CPU time.
_QUEUED_BYTES = 2**16

Result = asyncio.Future[TokenizeResult]


class TokenizerPool:
    """The tokenizer processes, each with the number of bytes of its unfinished requests.

    Clients take turns. Within a client, requests are sent in order, except that a short request
    passes long ones that wait for a process. If there are several processes, the last one gets no
    long requests, so that a short request never waits behind a long one.

    Each send function queues a message to one process and returns its size in bytes.
    _waiting  the requests of each client; a client that was served goes behind all others.
    """

    def __init__(self, send_functions: Sequence[Callable[[ToTokenizer], int]]) -> None:
        self._send_functions = send_functions
        self._uids = itertools.count(1)
        self._waiting: dict[str, dict[Result, TokenizeRequest]] = {}
        self._sent: dict[int, tuple[int, int, Result]] = {}  # By uid: worker, bytes, result.
        self._outstanding_bytes = [0] * len(send_functions)

    def submit(self, request: TokenizeRequest, client: str) -> Result:
        """Queue a request of a client. Cancelling the returned future withdraws it."""
        result: Result = asyncio.get_running_loop().create_future()
        if client not in self._waiting:
            self._waiting = {client: {}, **self._waiting}
        self._waiting[client][result] = request
        result.add_done_callback(lambda done: self._waiting[client].pop(done, None))
        self._dispatch()
        return result

    def receive(self, message: TokenizeResult) -> int:
        """Complete the future of this result, unless its call has ended. Returns the worker."""
        worker, size, result = self._sent.pop(message.uid)
        self._outstanding_bytes[worker] -= size
        self._dispatch()
        if not result.done():
            result.set_result(message)
        return worker

    def _dispatch(self) -> None:
        """Send waiting requests while a process has room for one."""
        while (found := self._next()) is not None:
            client, result, worker = found
            requests = self._waiting.pop(client)
            request, uid = requests.pop(result), next(self._uids)
            self._waiting[client] = requests  # behind the other clients
            size = self._send_functions[worker](msgspec.structs.replace(request, uid=uid))
            self._outstanding_bytes[worker] += size
            self._sent[uid] = worker, size, result

    def _next(self) -> tuple[str, Result, int] | None:
        """The client that is served next, its request, and the least busy process for it."""
        loads = self._outstanding_bytes
        for client, requests in self._waiting.items() if min(loads) < _QUEUED_BYTES else ():
            for result, request in requests.items():
                if result.done():  # The call has ended. The event loop has yet to run the callback.
                    continue
                allowed = (loads[:-1] or loads) if _size(request) > _QUEUED_BYTES else loads
                if min(allowed) < _QUEUED_BYTES:
                    return client, result, allowed.index(min(allowed))
        return None


def _size(request: TokenizeRequest) -> int:
    """The size of a request: the length of its longest text or bytes, and of all images."""
    if isinstance(request, TokenizeChat) and request.images:
        return _QUEUED_BYTES + sum(len(image.data) for image in request.images)
    fields = msgspec.structs.astuple(request)
    return max(len(value) for value in fields if isinstance(value, (str, bytes)))
