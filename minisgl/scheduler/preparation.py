"""`PreparationQueue`: the requests in PREPARING. It prepares a few of each client at a time."""

from dataclasses import dataclass, field

from minisgl.message.messages import Prepared
from minisgl.scheduler.call_order import CallOrder
from minisgl.scheduler.request import Req, ReqState

# Requests of one client and priority whose preparation has begun and that no step has admitted. A
# prepared constraint may take megabytes, and a call may have a thousand choices.
MAX_AHEAD = 32


WAIT_S = 0.001  # one wait for a constraint or a copy while no other request is open
# A preparation that is known to be shorter takes place when the request arrives: one for each
# client in an iteration. In another thread it would take one step more.
MAX_AT_ONCE_S = 0.005


class PreparationQueue:
    """The requests that wait for their constraints, outside of the queue of the planner.

    The calls of a client take turns. Constraint.start takes turns by client. This queue bounds the
    backlog of each client, so that the constraints of requests that are aborted in the queue take
    no time and no memory.

    preparing  all of its requests, by uid.
    """

    def __init__(self) -> None:
        self._queues: dict[tuple[str, int], _Queue] = {}
        self.preparing: dict[int, Req] = {}
        self._served: set[str] = set()

    def new_iteration(self) -> None:
        """Each client may have one request prepared at its arrival again."""
        self._served.clear()

    def add(self, req: Req) -> bool:
        """Add a new request. Its preparation begins at once if there is room.

        Returns True if the request is prepared already, and is not in the queue.
        """
        if not req.constraint.prepares:
            return True
        queue = self._queues.setdefault((req.client, req.priority), _Queue())
        queue.ahead = [other for other in queue.ahead if _waits(other)]
        is_short = req.constraint.start_s <= MAX_AT_ONCE_S and req.client not in self._served
        if is_short and not queue.turns and len(queue.ahead) < MAX_AHEAD:
            self._served.add(req.client)
            queue.ahead.append(req)
            _start(req, here=True)
            return req.constraint.prepared(None)
        req.state = ReqState.PREPARING
        self.preparing[req.uid] = req
        queue.turns.append(req)
        queue.begin()
        return False

    def again(self, req: Req) -> None:
        """Add a request that got no token from a step, or is paused. Its preparation begins.

        req.tokens: all known tokens.
        """
        req.state = ReqState.PREPARING
        self.preparing[req.uid] = req
        req.constraint.prepare(req.tokens)

    def prepared(self, wait: bool) -> Prepared:
        """Return the requests whose constraints are prepared on this rank.

        wait: wait for the oldest request, at most WAIT_S.
        """
        self.begin()
        if wait and self.preparing:
            next(iter(self.preparing.values())).constraint.prepared(WAIT_S)
        done = [req for req in self.preparing.values() if req.constraint.prepared()]
        failed = [req.uid for req in done if req.constraint.failure(len(req.tokens)) is not None]
        slow = [req.uid for req in done if req.constraint.slow]
        return Prepared(uids=[req.uid for req in done], failed=failed, slow=slow)

    def take(self, uid: int) -> Req | None:
        """Take out a request that is prepared on rank 0. Returns None if it was aborted.

        Waits for the constraint, because this rank may be later than rank 0.
        """
        req = self.preparing.pop(uid, None)
        if req is not None:
            if self._take(req):
                _start(req)
            req.constraint.prepared(None)
        return req

    def begin(self) -> None:
        """Begin further preparations, in the place of requests that were admitted or have ended."""
        for key, queue in list(self._queues.items()):
            queue.ahead = [req for req in queue.ahead if _waits(req)]
            queue.begin()
            if not queue.turns and not queue.ahead:
                del self._queues[key]

    def withdraw(self, req: Req) -> None:
        """Remove a request that was aborted before its constraint was prepared."""
        del self.preparing[req.uid]
        if not self._take(req):
            req.constraint.withdraw()

    def _take(self, req: Req) -> bool:
        """Take out a request. Returns False if its preparation has begun."""
        return self._queues.get((req.client, req.priority), _Queue()).turns.remove(req)


@dataclass(eq=False, slots=True)
class _Queue:
    """The requests of one client and priority.

    turns  the requests whose preparation has not begun.
    ahead  the requests whose preparation has begun.
    """

    turns: CallOrder = field(default_factory=CallOrder)
    ahead: list[Req] = field(default_factory=list)

    def begin(self) -> None:
        """Begin preparations while there is room, one of each call in turn."""
        while self.turns and len(self.ahead) < MAX_AHEAD:
            req = next(iter(self.turns))
            self.turns.remove(req)
            self.ahead.append(req)
            _start(req)


def _waits(req: Req) -> bool:
    """The request has not been admitted and has not ended."""
    return not req.admitted and req.state is not ReqState.FINISHED


def _start(req: Req, here: bool = False) -> None:
    req.constraint.start(req.client, here)
