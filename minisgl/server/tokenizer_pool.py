"""Distributes tokenize requests over the tokenizer processes."""

import asyncio
import itertools
from collections.abc import Callable, Sequence

import msgspec

from minisgl.message.messages import TokenizeRequest, TokenizeResult, ToTokenizer

# A request that has been sent to a tokenizer process cannot be withdrawn. A process therefore gets
# new requests only while its unfinished ones have fewer bytes than this. The other requests wait in
# the pool, which removes a request when its call ends.
_QUEUED_BYTES = 2**16

Result = asyncio.Future[TokenizeResult]


class TokenizerPool:
    """The tokenizer processes, each with the number of bytes of its unfinished requests.

    Each send function queues a message to one process and returns its size in bytes.
    """

    def __init__(self, send_functions: Sequence[Callable[[ToTokenizer], int]]) -> None:
        self._send_functions = send_functions
        self._uids = itertools.count(1)
        self._waiting: dict[Result, TokenizeRequest] = {}
        self._sent: dict[int, tuple[int, int, Result]] = {}  # By uid: worker, bytes, result.
        self._outstanding_bytes = [0] * len(send_functions)

    def submit(self, request: TokenizeRequest) -> Result:
        """Queue a request. Cancelling the returned future withdraws it."""
        result: Result = asyncio.get_running_loop().create_future()
        self._waiting[result] = request
        result.add_done_callback(lambda done: self._waiting.pop(done, None))
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
        """Send waiting requests, in order, to the least busy process while it has room."""
        while self._waiting and min(self._outstanding_bytes) < _QUEUED_BYTES:
            worker = self._outstanding_bytes.index(min(self._outstanding_bytes))
            result = next(iter(self._waiting))
            request, uid = self._waiting.pop(result), next(self._uids)
            size = self._send_functions[worker](msgspec.structs.replace(request, uid=uid))
            self._outstanding_bytes[worker] += size
            self._sent[uid] = worker, size, result
