"""`WaitingQueue`: the waiting requests, in the order of service."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, zip_longest

from minisgl.scheduler.request import Req


@dataclass(slots=True)
class _ClientQueue:
    """The waiting requests of one client: preempted ones first, then the calls in turn.

    calls  the requests of each call by its number; the call that is served next comes first.
    """

    preempted: deque[Req] = field(default_factory=deque)
    calls: dict[int, deque[Req]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Req]:
        return chain(self.preempted, _in_turn(self.calls.values()))


class WaitingQueue:
    """The queue of the planner. It alone decides the order in which requests are served.

    Clients take turns. Within a client, preempted requests come first, and then calls take turns:
    a call of 128 choices delays a later call of the same client by one choice, not by 128. Requests
    of one call, and calls of one choice, are in order of arrival. An offline run has one client and
    one call, so its queue is first in, first out.
    """

    def __init__(self) -> None:
        self._clients: dict[str, _ClientQueue] = {}
        self._arrived: dict[Req, None] = {}  # a dict and not a set, because it keeps the order

    def __len__(self) -> int:
        return len(self._arrived)

    def __iter__(self) -> Iterator[Req]:
        """In the order of service, if each client gets the same number of turns."""
        return _in_turn(self._clients.values())

    def __reversed__(self) -> Iterator[Req]:
        """The request that began to wait last comes first."""
        return reversed(self._arrived)

    @property
    def clients(self) -> Iterable[str]:
        """The clients of the waiting requests."""
        return self._clients.keys()

    def of(self, client: str) -> Iterable[Req]:
        """The waiting requests of one client, in the order of service."""
        return self._clients.get(client, ())

    def append(self, req: Req) -> None:
        """Add a request: to its call, or before all calls of its client if it was preempted."""
        queue = self._clients.setdefault(req.client, _ClientQueue())
        if req.admitted:
            queue.preempted.appendleft(req)
        else:
            queue.calls.setdefault(req.call, deque()).append(req)
        self._arrived[req] = None

    def remove(self, req: Req) -> None:
        """Take a request out. Its call is served again after the other calls of the client."""
        del self._arrived[req]
        queue = self._clients[req.client]
        if req in queue.preempted:
            queue.preempted.remove(req)
        else:
            call = queue.calls.pop(req.call)
            call.remove(req)
            if call:
                queue.calls[req.call] = call
        if not queue.preempted and not queue.calls:
            del self._clients[req.client]


def _in_turn(queues: Iterable[Iterable[Req]]) -> Iterator[Req]:
    """The first request of each queue, then the second of each, and so on."""
    return (req for turn in zip_longest(*queues) for req in turn if req is not None)
