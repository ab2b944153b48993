"""`WaitingQueue`: the waiting requests of each client, in the order of service."""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from itertools import chain, zip_longest
from operator import itemgetter

from minisgl.scheduler.request import Req

RECENT_REQS = 256  # a priority is in use while one of this many last requests has it


class WaitingQueue:
    """The queue of the planner. It decides the order of the requests of each client.

    Requests with a lower priority number come first. Within one priority, the calls of a client
    take turns: a call of 128 choices delays a later call of the same client by one choice, not by
    128. Requests of one call, and calls of one choice, are in order of arrival. A preempted request
    comes first. ClientShares decides the order of the clients. An offline run has one client, one
    priority and one call, so its queue is first in, first out.

    highest_class  the lowest priority number in use.
    has_classes    several priorities are in use.
    _queues   by priority and client, then by call: the waiting requests. The call that is served
              next is first.
    _reqs     all requests in the order in which they began to wait. It is a dict and not a set,
              because it keeps the order.
    """

    def __init__(self) -> None:
        self.highest_class = 0
        self.has_classes = False
        self._queues: dict[tuple[int, str], dict[int, deque[Req]]] = {}
        self._reqs: dict[Req, None] = {}
        self._recent: deque[int] = deque(maxlen=RECENT_REQS)

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Req]:
        in_order = sorted(self._queues, key=itemgetter(0))
        return chain.from_iterable(self.of(client, level) for level, client in in_order)

    def __reversed__(self) -> Iterator[Req]:
        """The request that began to wait last comes first."""
        return reversed(self._reqs)

    @property
    def clients(self) -> set[str]:
        """The clients of the waiting requests."""
        return {client for _, client in self._queues}

    @property
    def levels(self) -> defaultdict[int, set[str]]:
        """The clients of the waiting requests, by priority."""
        levels: defaultdict[int, set[str]] = defaultdict(set)
        for level, client in self._queues:
            levels[level].add(client)
        return levels

    def longest_delayed(self, prefilling: Iterable[Req]) -> Req | None:
        """The first admitted prompt of a later priority, or else the oldest waiting request.

        prefilling: the admitted prompts, in order of admission.
        """
        later = (req for req in prefilling if req.priority > self.highest_class)
        return next(later, next(iter(self._reqs), None))

    def of(self, client: str, level: int = 0) -> Iterator[Req]:
        """The waiting requests of one client and priority, in order: calls take turns."""
        turns = zip_longest(*self._queues.get((level, client), {}).values())
        return (req for turn in turns for req in turn if req is not None)

    def append(self, req: Req) -> None:
        """Add a request to the end of its call; a preempted one before all others of its client."""
        self._recent.append(req.priority)
        self.highest_class = min(self._recent)
        self.has_classes = self.highest_class < max(self._recent)
        self._reqs[req] = None
        self._insert(req, first=req.admitted)

    def remove(self, req: Req) -> None:
        """Take a request out. Its call is served again after the other calls of the client."""
        del self._reqs[req]
        self._take(req)

    def raise_to(self, req: Req, level: int) -> None:
        """Give a request this priority. A waiting one comes before all others of its client."""
        if req not in self._reqs:
            req.priority = level
            return
        self._take(req)
        req.priority = level
        self._insert(req, first=True)

    def _insert(self, req: Req, first: bool) -> None:
        key = req.priority, req.client
        calls = self._queues.setdefault(key, {})
        if first:
            call = calls.pop(req.call, deque())
            call.appendleft(req)
            self._queues[key] = {req.call: call, **calls}
        else:
            calls.setdefault(req.call, deque()).append(req)

    def _take(self, req: Req) -> None:
        key = req.priority, req.client
        calls = self._queues[key]
        call = calls.pop(req.call)
        call.remove(req)
        if call:
            calls[req.call] = call
        elif not calls:
            del self._queues[key]
