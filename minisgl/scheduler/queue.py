"""`WaitingQueue`: the waiting requests of each client, in the order of service."""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, zip_longest

from minisgl.scheduler.request import Req


class WaitingQueue:
    """The queue of the planner. It decides the order of the requests of each client.

    The calls of a client take turns: a call of 128 choices delays a later call of the same client
    by one choice, not by 128. Requests of one call, and calls of one choice, are in order of
    arrival. A preempted request comes first. ClientShares decides the order of the clients. An
    offline run has one client and one call, so its queue is first in, first out.

    _clients  by client, then by call: the waiting requests. The call that is served next is first.
    _reqs     all requests in the order in which they began to wait. It is a dict and not a set,
              because it keeps the order.
    """

    def __init__(self) -> None:
        self._clients: dict[str, dict[int, deque[Req]]] = {}
        self._reqs: dict[Req, None] = {}

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Req]:
        return chain.from_iterable(map(self.of, self._clients))

    def __reversed__(self) -> Iterator[Req]:
        """The request that began to wait last comes first."""
        return reversed(self._reqs)

    @property
    def clients(self) -> Iterable[str]:
        """The clients of the waiting requests."""
        return self._clients.keys()

    def of(self, client: str) -> Iterator[Req]:
        """The waiting requests of one client in the order of service: calls take turns."""
        turns = zip_longest(*self._clients.get(client, {}).values())
        return (req for turn in turns for req in turn if req is not None)

    def append(self, req: Req) -> None:
        """Add a request: to the end of its call, or, if preempted, before all of its client."""
        self._reqs[req] = None
        calls = self._clients.setdefault(req.client, {})
        if req.admitted:
            call = calls.pop(req.call, deque())
            call.appendleft(req)
            self._clients[req.client] = {req.call: call, **calls}
        else:
            calls.setdefault(req.call, deque()).append(req)

    def remove(self, req: Req) -> None:
        """Take a request out. Its call is served again after the other calls of the client."""
        del self._reqs[req]
        calls = self._clients[req.client]
        call = calls.pop(req.call)
        call.remove(req)
        if call:
            calls[req.call] = call
        elif not calls:
            del self._clients[req.client]
