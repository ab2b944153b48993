"""The order of service: the queue of waiting requests, and the shares of the clients."""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from operator import itemgetter

import numpy as np

from minisgl.core.batch import Int32Array
from minisgl.scheduler.call_order import CallOrder
from minisgl.scheduler.request import Req
from minisgl.scheduler.request_table import RequestTable

RECENT_REQS = 256  # a priority is in use while one of this many last requests has it


class WaitingQueue:
    """The waiting requests. It decides the order of the requests of each client.

    Requests with a lower priority number come first. Within one priority, the calls of a client
    take turns (CallOrder). A preempted request comes first. Shares decides the order of the
    clients. An offline run has one client, one priority and one call, so its queue is first in,
    first out.

    first_priority      the lowest priority number in use.
    several_priorities  several priorities are in use.
    clients             a number for every client so far; the API server has a fixed number of them.
    uncached_tokens     by priority and client: the sum of Req.uncached_tokens. It has a key exactly
                        if a request of them waits, even at a sum of 0.
    _queues             by priority and client: the waiting requests.
    _reqs               all requests in the order in which they began to wait. It is a dict and not
                        a set, because it keeps the order.
    """

    def __init__(self) -> None:
        self.first_priority = 0
        self.several_priorities = False
        self.clients: dict[str, int] = {}
        self.uncached_tokens: Counter[tuple[int, str]] = Counter()
        self._queues: dict[tuple[int, str], CallOrder] = {}
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

    def is_first(self, req: Req) -> bool:
        """The request has the first priority in use."""
        return req.priority <= self.first_priority

    def longest_delayed(self, prefilling: Iterable[Req]) -> Req | None:
        """The first admitted prompt of a later priority, or else the oldest waiting request.

        prefilling: the admitted prompts, in order of admission.
        """
        later = (req for req in prefilling if not self.is_first(req))
        return next(later, next(iter(self._reqs), None))

    def of(self, client: str, level: int = 0, admitted: Sequence[Req] = ()) -> Iterator[Req]:
        """The waiting requests of one client and priority, in order: calls take turns.

        admitted: requests that a plan has taken out already, in this order.
        """
        turns = self._queues.get((level, client), CallOrder())
        taken = [req for req in admitted if (req.priority, req.client) == (level, client)]
        return iter(turns.without(taken) if taken else turns)

    def append(self, req: Req) -> None:
        """Add a request to the end of its call.

        A preempted one, or one whose prefix has been loaded from host memory, comes before all
        others of its client.
        """
        self.clients.setdefault(req.client, len(self.clients))
        self._recent.append(req.priority)
        self.first_priority = min(self._recent)
        self.several_priorities = self.first_priority < max(self._recent)
        self._reqs[req] = None
        self._insert(req, first=req.admitted or req.loaded)

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
        self.uncached_tokens[key] += req.uncached_tokens
        turns = self._queues.setdefault(key, CallOrder())
        if first:
            turns.put_first(req)
        else:
            turns.append(req)

    def _take(self, req: Req) -> None:
        key = req.priority, req.client
        self.uncached_tokens[key] -= req.uncached_tokens
        self._queues[key].remove(req)
        if not self._queues[key]:
            del self._queues[key], self.uncached_tokens[key]


class Shares:
    """Divides rows and KV pages between the clients that have work, for one plan.

    The fair share of a client is all rows, and all pages, divided by the number of clients with
    running or waiting requests. A client may hold more than its share while other clients do not
    need it (work conservation). If a request finds no room, and its client is within its share, the
    plan preempts the newest request of the client that holds the most. This is max-min fairness
    for rows and for pages. It depends on present holdings only, and not on past use.

    Within one priority, the last running request of a client is never preempted for another client,
    so that each client makes progress. A request that needs more than the fair share of pages waits
    until the other clients leave that many pages free.

    The share of one client alone is all rows and all pages.
    """

    def __init__(
        self, table: RequestTable, waiting: WaitingQueue, pages: Int32Array, num_pages: int
    ) -> None:
        """pages: int32 [R], the number of pages of each row."""
        self._rows: Counter[str] = Counter()
        self._pages: Counter[str] = Counter()
        self._num_rows, self._num_pages = table.rows.size, num_pages
        rows, most = np.flatnonzero(table.running), len(waiting.clients)
        clients = table.client[rows]
        held = np.bincount(clients, minlength=most).tolist()
        held_pages = np.bincount(clients, pages[rows], minlength=most).tolist()
        for client, number in waiting.clients.items():
            if held[number]:
                self._rows[client], self._pages[client] = held[number], int(held_pages[number])
        with_work = max(len({*self._rows, *(client for _, client in waiting.uncached_tokens)}), 1)
        self._fair_rows = max(table.rows.size // with_work, 1)
        self._fair_pages = max(num_pages // with_work, 1)

    def in_order(self, clients: Iterable[str]) -> list[str]:
        """Order clients for service: the one with the smallest share of rows or pages first.

        The larger of the two shares counts (dominant resource fairness, Ghodsi et al., NSDI 2011).
        """

        def share(client: str) -> tuple[float, str]:
            rows, pages = self._rows[client], self._pages[client]
            return max(rows / self._num_rows, pages / self._num_pages), client

        return sorted(clients, key=share)

    def age(self, req: Req) -> tuple[int, bool, int]:
        """The order in which running requests keep their pages; the last one is preempted first.

        Among requests of one priority, those of a client that holds more than its fair share of the
        pages count as newer than all others.
        """
        return req.priority, self._pages[req.client] > self._fair_pages, req.arrival_index

    def is_within(self, req: Req, pages: int) -> bool:
        """The client stays within its shares if it gets a row and `pages` pages for `req`."""
        rows = self._rows[req.client] + 1
        return rows <= self._fair_rows and self._pages[req.client] + pages <= self._fair_pages

    def record_admitted(self, req: Req, pages: int) -> None:
        """Count the row and the pages that the plan gives to `req`."""
        self._rows[req.client] += 1
        self._pages[req.client] += pages

    def victim(self, req: Req, running: Collection[Req], rows_left: int) -> Req | None:
        """The request of `running` to preempt for `req`; None if no client holds too much.

        If requests of later priorities run, it is the newest request of the last priority.
        """
        if later := [other for other in running if other.priority > req.priority]:
            return max(later, key=lambda other: (other.priority, other.arrival_index))
        held, fair = self._pages, self._fair_pages
        if not rows_left:
            held, fair = self._rows, self._fair_rows
        over = {c for c in held if c != req.client and held[c] > fair and self._rows[c] > 1}
        others = [r for r in running if r.client in over and r.priority == req.priority]
        return max(others, key=lambda r: (held[r.client], r.arrival_index), default=None)
