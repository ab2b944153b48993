"""Loading, ready, draining: what the probes say and whether a request is accepted. No I/O.

The clock is an argument everywhere, so that tests need none.
"""

from enum import StrEnum

from minisgl.core import ModelFacts
from minisgl.message import Ready, SchedulerStats
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
        self._missing = set(roles)
        self._facts: ModelFacts | None = None
        self.phase = Phase.LOADING

    @property
    def facts(self) -> ModelFacts | None:
        return self._facts

    @property
    def missing(self) -> list[str]:
        return sorted(self._missing)

    def on_ready(self, message: Ready) -> bool:
        """True when this was the last one that was missing."""
        self._missing.discard(message.role)
        if message.facts is not None:
            self._facts = message.facts
        if self.phase is Phase.LOADING and not self._missing and self._facts is not None:
            self.phase = Phase.READY
            return True
        return False

    @property
    def leaving(self) -> bool:
        return self.phase in (Phase.GRACE, Phase.DRAINING, Phase.CLOSED)

    def require_accepting(self, kept: bool = False) -> ModelFacts:
        """The facts of the model, or NotReady that says why no request is taken.

        kept: the request came on a connection that has brought others before. While leaving, each
        answer tells its client to close, so this one could not have been told.
        """
        accepting = self.phase in (Phase.READY, Phase.GRACE)
        if (accepting or (kept and self.phase is Phase.DRAINING)) and self._facts is not None:
            return self._facts
        if self.phase is Phase.LOADING:
            raise NotReady("the model is still loading")
        if self.phase is Phase.FAILED:
            raise NotReady("the service has failed and is restarting")
        raise NotReady("the server is shutting down")


class Pulse:
    """Tells a worker that hangs (asked, and nothing heard for `timeout_s`) from a busy one."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._asked_s: dict[str, float] = {}

    def ask(self, role: str, now_s: float) -> bool:
        """True when `role` is to be asked now: it has answered the last time."""
        if role in self._asked_s:
            return False
        self._asked_s[role] = now_s
        return True

    def heard(self, role: str, now_s: float, answer: bool = False) -> None:
        """Something came from `role`, if not yet the answer: it lives, and may have much to do."""
        if answer:
            self._asked_s.pop(role, None)
        elif role in self._asked_s:
            self._asked_s[role] = now_s

    def hanging(self, now_s: float) -> str | None:
        """A role that hangs; None while none does."""
        if not self._timeout_s:
            return None
        late = (r for r, asked_s in self._asked_s.items() if now_s - asked_s > self._timeout_s)
        return next(late, None)


class Progress:
    """Tells a hang (work pending, no step for `timeout_s`) from idleness. 0: never a hang."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._step_id = -1
        self._busy = False
        self._since_s: float | None = None

    def on_stats(self, stats: SchedulerStats, now_s: float) -> None:
        if stats.step_id != self._step_id:
            self._since_s = now_s
        self._step_id = stats.step_id
        self._busy = stats.busy

    def on_output(self, now_s: float) -> None:
        """Text has arrived, so a step has ended."""
        self._since_s = now_s

    def stuck_s(self, pending: bool, now_s: float) -> float:
        """Seconds without a step while there is work; 0 when idle. Call it now and then."""
        if not (pending or self._busy) or self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s

    def hangs(self, pending: bool, now_s: float) -> bool:
        return self._timeout_s > 0 and self.stuck_s(pending, now_s) > self._timeout_s
