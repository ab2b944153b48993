"""Distributes tokenize requests over the tokenizer processes. Clients take turns."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from minisgl.message.messages import (
    TokenizeChat,
    TokenizeRequest,
    TokenizeResult,
    TokenizeText,
    ToTokenizer,
)

# A request that has been sent to a tokenizer process cannot be withdrawn. A process therefore gets
# new requests only while its unfinished ones have fewer bytes than this. The other requests wait in
# the pool, which removes a request when its call ends. A request with more bytes is long; a process
# that works on one has no room.
_QUEUED_BYTES = 2**16

Result = asyncio.Future[TokenizeResult]


@dataclass(eq=False, slots=True)
class _Worker:
    """One process: its send function, and the bytes of its unfinished requests."""

    send: Callable[[ToTokenizer], int]
    index: int
    outstanding_bytes: int = 0


class TokenizerPool:
    """The tokenizer processes, and the requests that wait for them.

    Clients take turns. Within a client, requests are sent in order, except that a short request
    passes long ones that wait for a process. If there are several processes, one of them gets no
    long requests, so that a short request never waits behind a long one.

    Each send function queues a message to one process and returns its size in bytes.
    """

    def __init__(self, send_functions: Sequence[Callable[[ToTokenizer], int]]) -> None:
        self._workers = [_Worker(send, index) for index, send in enumerate(send_functions)]
        self._uids = itertools.count(1)
        self._waiting: dict[str, dict[Result, TokenizeRequest]] = {}  # By client.
        self._last_uids: dict[str, int] = {}  # Of each client's last request that was sent.
        self._sent: dict[int, tuple[_Worker, int, Result]] = {}  # By uid: worker, bytes, result.

    def submit(self, request: TokenizeRequest, client: str) -> Result:
        """Queue a request of a client. Cancelling the returned future withdraws it."""
        result: Result = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, {})[result] = request
        result.add_done_callback(lambda done: self._forget(done, client))
        self._dispatch()
        return result

    def receive(self, message: TokenizeResult) -> int:
        """Complete the future of this result, unless its call has ended. Returns the worker."""
        worker, size, result = self._sent.pop(message.uid)
        worker.outstanding_bytes -= size
        self._dispatch()
        if not result.done():
            result.set_result(message)
        return worker.index

    def _forget(self, result: Result, client: str) -> None:
        queue = self._waiting.get(client, {})
        if queue.pop(result, None) is not None and not queue:
            del self._waiting[client]

    def _dispatch(self) -> None:
        """Send waiting requests while a process has room for one."""
        while (found := self._next()) is not None:
            client, result, worker = found
            request, uid = self._waiting[client][result], next(self._uids)
            self._forget(result, client)
            self._last_uids[client] = uid
            size = worker.send(msgspec.structs.replace(request, uid=uid))
            worker.outstanding_bytes += size
            self._sent[uid] = worker, size, result

    def _next(self) -> tuple[str, Result, _Worker] | None:
        """The client that is served next, its request, and the process for the request."""
        any_worker = _least_busy(self._workers)
        worker_for_long = _least_busy(self._workers[:-1] or self._workers)
        if any_worker is None:
            return None
        # The client that has waited longest for its turn comes first.
        for client in sorted(self._waiting, key=lambda client: self._last_uids.get(client, 0)):
            for result, request in self._waiting[client].items():
                worker = worker_for_long if _size(request) > _QUEUED_BYTES else any_worker
                if worker is not None:
                    return client, result, worker
        return None


def _least_busy(workers: Sequence[_Worker]) -> _Worker | None:
    """The process with the fewest unfinished bytes, if it has room."""
    least = min(workers, key=lambda worker: worker.outstanding_bytes)
    return least if least.outstanding_bytes < _QUEUED_BYTES else None


def _size(request: TokenizeRequest) -> int:
    """The size of a request: characters of a text, or bytes of a chat or of token ids."""
    if isinstance(request, TokenizeText):
        return len(request.text)
    if isinstance(request, TokenizeChat):
        return len(request.messages_json)
    return len(request.token_ids)
