"""`CallOrder`: the order in which the calls of one client are served."""

from collections import deque
from collections.abc import Iterable, Iterator

from minisgl.scheduler.request import Req


class CallOrder:
    """Requests of one client and priority. Iterating yields them in their order.

    The calls of the client take turns: a call of 128 choices delays a later call by one choice, not
    by 128. Requests of one call, and calls of one choice, are in order of arrival.

    _calls  the requests of each call. The call that is served next is first.
    """

    def __init__(self) -> None:
        self._calls: dict[int, deque[Req]] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def __iter__(self) -> Iterator[Req]:
        calls = self._calls.values()
        yield from (call[0] for call in calls)
        for nth in range(1, max(map(len, calls), default=0)):
            yield from (call[nth] for call in calls if nth < len(call))

    def append(self, req: Req) -> None:
        """Add a request to the end of its call."""
        self._calls.setdefault(req.call, deque()).append(req)

    def put_first(self, req: Req) -> None:
        """Add a request before all others, also those of other calls."""
        call = self._calls.pop(req.call, deque())
        call.appendleft(req)
        self._calls = {req.call: call, **self._calls}

    def remove(self, req: Req) -> bool:
        """Take a request out. Its call is served again after the other calls.

        Returns False if the request is not there.
        """
        call = self._calls.get(req.call, deque())
        if req not in call:
            return False
        call.remove(req)
        del self._calls[req.call]
        if call:
            self._calls[req.call] = call
        return True

    def without(self, taken: Iterable[Req]) -> "CallOrder":
        """Return the order after `taken` are taken out one after the other. This one stays."""
        left = CallOrder()
        left._calls = dict(self._calls)
        for req in taken:
            left._calls[req.call] = left._calls[req.call].copy()
            left.remove(req)
        return left
