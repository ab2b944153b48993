"""`ClientShares`: divides rows and pages between clients, and chooses requests to preempt."""

from collections import Counter
from collections.abc import Iterable, Sequence

from minisgl.scheduler.request import Req, ReqState
from minisgl.scheduler.request_table import RequestTable


class ClientShares:
    """Divides rows and KV pages between the clients that have work.

    The fair share of a client is all rows, and all pages, divided by the number of clients with
    running or waiting requests. A client may hold more than its share while other clients do not
    need it (work conservation). If a request finds no room, and its client is within its share, the
    planner preempts the newest request of the client that holds the most. This is max-min fairness
    for rows and for pages. It depends on present holdings only, and not on past use.

    Within one priority, the last running request of a client is never preempted for another client,
    so that each client makes progress. A request that needs more than the fair share of pages waits
    until the other clients leave that many pages free.

    The planner calls `measure` at the start of each plan. With one client, `measure` counts no
    holdings, and no request is preempted for another client.

    clients  every client so far; the API server has a fixed number of them.
    """

    def __init__(self, table: RequestTable, num_pages: int) -> None:
        self.clients: set[str] = set()
        self._table = table
        self._num_pages = num_pages
        self._rows: Counter[str] = Counter()
        self._pages: Counter[str] = Counter()
        self._fair_rows = table.rows.size
        self._fair_pages = num_pages

    def measure(self, waiting: Iterable[str]) -> None:
        """Count the holdings. waiting: the clients of waiting requests."""
        self._rows.clear()
        self._pages.clear()
        if len(self.clients) < 2:
            return
        table = self._table
        for req in table.reqs:
            if req is not None and req.state in (ReqState.PREFILL, ReqState.DECODE):
                self._rows[req.client] += 1
                self._pages[req.client] += int(table.pages.counts[req.row])
        with_work = max(len({*self._rows, *waiting}), 1)
        self._fair_rows = max(table.rows.size // with_work, 1)
        self._fair_pages = max(self._num_pages // with_work, 1)

    def in_order(self, clients: Iterable[str]) -> list[str]:
        """Order clients for service: the one with the smallest share of rows or pages first.

        The larger of the two shares counts (dominant resource fairness, Ghodsi et al., NSDI 2011).
        """

        def share(client: str) -> float:
            rows, pages = self._rows[client], self._pages[client]
            return max(rows / self._table.rows.size, pages / self._num_pages)

        return sorted(clients, key=lambda client: (share(client), client))

    def is_over(self, req: Req) -> bool:
        """The client of this running request holds more than its fair share of pages."""
        return self._pages[req.client] > self._fair_pages

    def is_within(self, req: Req, pages: int) -> bool:
        """The client stays within its shares if it gets a row and `pages` pages for `req`."""
        rows = self._rows[req.client] + 1
        return rows <= self._fair_rows and self._pages[req.client] + pages <= self._fair_pages

    def record_admitted(self, req: Req, pages: int) -> None:
        """Count the row and the pages that `req` has got in this plan."""
        self._rows[req.client] += 1
        self._pages[req.client] += pages

    def victim(self, req: Req, running: Sequence[Req]) -> Req | None:
        """The request of `running` to preempt for `req`; None if no client holds too much.

        If requests of later priorities run, it is the newest request of the last priority.
        """
        if later := [other for other in running if other.priority > req.priority]:
            return max(later, key=lambda other: (other.priority, other.arrival_index))
        held, fair = self._pages, self._fair_pages
        if not self._table.rows.num_free:
            held, fair = self._rows, self._fair_rows
        others = [
            other
            for other in running
            if other.client != req.client
            and other.priority == req.priority
            and held[other.client] > fair
            and self._rows[other.client] > 1
        ]
        return max(others, key=lambda r: (held[r.client], r.arrival_index), default=None)
