"""Sends the grammars of requests to the process that compiles them, and keeps its results."""

import asyncio
import hashlib
import itertools
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable

import msgspec

from minisgl.message.messages import CompileGrammar, GrammarResult, ToGrammars

# The process always has the next job of a client while the result of the first one is on its way.
# Further jobs wait here, where the end of their call withdraws them.
OPEN_JOBS = 2
_CACHED_BYTES = 2**25
_RESULT_BYTES = 450  # of a kept result besides its source, measured by tracemalloc

Result = asyncio.Future[GrammarResult]


class GrammarPool:
    """The grammars that wait for their result, and the results of accepted grammars.

    The process takes turns by client. It has at most OPEN_JOBS of each client.

    send      queues a message to the process.
    _waiting  the grammars of each client that have not been sent, in order.
    _sent     by uid: the client, the key of the grammar, and the result.
    """

    def __init__(self, send: Callable[[ToGrammars], object]) -> None:
        self._send = send
        self._uids = itertools.count(1)
        self._waiting: defaultdict[str, dict[Result, CompileGrammar]] = defaultdict(dict)
        self._open: Counter[str] = Counter()
        self._sent: dict[int, tuple[str, bytes, Result]] = {}
        self._accepted: OrderedDict[bytes, GrammarResult] = OrderedDict()
        self._cached_bytes = 0

    def submit(self, request: CompileGrammar, client: str) -> Result:
        """Queue a grammar of a client. Cancelling the returned future withdraws it."""
        result: Result = asyncio.get_running_loop().create_future()
        if (known := self._known(_key(request))) is not None:
            result.set_result(known)
            return result
        self._waiting[client][result] = request
        result.add_done_callback(lambda done: self._waiting[client].pop(done, None))
        self._dispatch(client)
        return result

    def receive(self, message: GrammarResult) -> None:
        """Complete the future of this result, unless its call has ended."""
        client, key, result = self._sent.pop(message.uid)
        self._open[client] -= 1
        if message.error is None and key not in self._accepted:
            self._accepted[key] = message
            self._cached_bytes += _size(message)
            while self._cached_bytes > _CACHED_BYTES:
                self._cached_bytes -= _size(self._accepted.popitem(last=False)[1])
        if not result.done():
            result.set_result(message)
        self._dispatch(client)

    def _dispatch(self, client: str) -> None:
        """Send waiting grammars of a client. Those that are known by now get their result."""
        waiting = self._waiting[client]
        while waiting and self._open[client] < OPEN_JOBS:
            result = next(iter(waiting))
            request = waiting.pop(result)
            if result.done():  # The call has ended. The event loop has yet to run the callback.
                continue
            key = _key(request)
            if (known := self._known(key)) is not None:
                result.set_result(known)
                continue
            uid = next(self._uids)
            self._open[client] += 1
            self._sent[uid] = client, key, result
            self._send(msgspec.structs.replace(request, uid=uid, client=client))

    def _known(self, key: bytes) -> GrammarResult | None:
        if (known := self._accepted.get(key)) is not None:
            self._accepted.move_to_end(key)
        return known


def _size(result: GrammarResult) -> int:
    """The memory of a kept result in bytes."""
    source = "" if result.grammar is None else result.grammar.source
    return _RESULT_BYTES + sys.getsizeof(source)


def _key(request: CompileGrammar) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(request)).digest()
