"""Loading, ready, draining: what the probes say and whether a request is accepted. No I/O.

The clock is an argument everywhere, so that tests need none.
"""

from enum import StrEnum

from minisgl.core import ModelFacts
from minisgl.message import Ready
from minisgl.server.errors import NotReady


class Phase(StrEnum):
    """Where the service is; it only moves forward."""

    LOADING = "loading"
    READY = "ready"
    GRACE = "draining, still accepting"  # the endpoint is being taken out of its Service
    DRAINING = "draining"  # accepting only on connections that have not been told to go elsewhere
    CLOSED = "draining, out of time"
    FAILED = "failed"


class Lifecycle:
    """Waits for one Ready of each role, and then for the signal to drain."""

    def __init__(self, roles: frozenset[str]) -> None:
        self.missing = set(roles)
        self.facts: ModelFacts | None = None
        self.phase = Phase.LOADING

    def on_ready(self, message: Ready) -> ModelFacts | None:
        """The facts of the model when this was the last one that was missing."""
        self.missing.discard(message.role)
        self.facts = message.facts or self.facts
        if self.phase is not Phase.LOADING or self.missing or self.facts is None:
            return None
        self.phase = Phase.READY
        return self.facts

    @property
    def leaving(self) -> bool:
        return self.phase in (Phase.GRACE, Phase.DRAINING, Phase.CLOSED)

    def require_accepting(self, kept: bool = False) -> ModelFacts:
        """The facts of the model, or NotReady that says why no request is taken.

        kept: the request came on a connection that has brought others before. While leaving, each
        answer tells its client to close, so this one could not have been told.
        """
        accepting = self.phase in (Phase.READY, Phase.GRACE)
        if (accepting or (kept and self.phase is Phase.DRAINING)) and self.facts is not None:
            return self.facts
        if self.phase is Phase.LOADING:
            raise NotReady("the model is still loading")
        if self.phase is Phase.FAILED:
            raise NotReady("the service has failed and is restarting")
        raise NotReady("the server is shutting down")


class Watchdog:
    """Tells who hangs (something is expected, and nothing heard for `timeout_s`) from who is busy
    or idle. 0: nobody ever hangs."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._silent_since_s: dict[str, float] = {}

    def expect(self, role: str, now_s: float) -> bool:
        """Something is expected of `role` from now on; False if it was before."""
        if role in self._silent_since_s:
            return False
        self._silent_since_s[role] = now_s
        return True

    def heard(self, role: str, now_s: float) -> None:
        """Something came, if not all that is expected: it lives, and may have much to do."""
        if role in self._silent_since_s:
            self._silent_since_s[role] = now_s

    def satisfied(self, role: str) -> None:
        """Nothing is expected of `role` any more."""
        self._silent_since_s.pop(role, None)

    def hanging(self, now_s: float) -> str | None:
        """A role that hangs; None while none does."""
        late = (r for r, s in self._silent_since_s.items() if now_s - s > self._timeout_s)
        return next(late, None) if self._timeout_s else None
