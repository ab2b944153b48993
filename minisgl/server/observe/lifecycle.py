"""The phases of the service and the detection of hung workers. Nothing here does I/O.

The clock is an argument of Watchdog, so that its tests do not depend on time.
"""

import os
import time
from collections import defaultdict
from enum import StrEnum
from math import inf

import msgspec

from minisgl.core import ModelFacts, TokenizerInfo
from minisgl.message.messages import Ready
from minisgl.server.errors import NotReady


class Phase(StrEnum):
    """The phase of the service. Phases only advance, in this order."""

    LOADING = "loading"
    READY = "ready"
    GRACE = "draining, still accepting"  # Kubernetes removes the endpoint from its Service
    DRAINING = "draining"  # accepting only on connections that have not been told to close
    CLOSED = "draining, out of time"
    FAILED = "failed"


def after_failure() -> str:
    """The end of a message about a failure: Kubernetes or the user starts the service again."""
    restarts = "KUBERNETES_SERVICE_HOST" in os.environ
    return "Kubernetes restarts it" if restarts else "it ends, and its log has the reason"


class Lifecycle:
    """The phase of the service, and the state of its processes.

    missing           the roles that have not sent Ready yet.
    facts, tokenizer  None until a process has sent them.
    hung              name of a hung worker (see Watchdog), or None.
    stalled           name of a hung worker or of a stalled scheduler, or None.
    renewed_s         time at which the event loop of the service renewed the two names, on
                      CLOCK_MONOTONIC. It renews them every half second.
    """

    def __init__(self, roles: frozenset[str], facts: ModelFacts | None = None) -> None:
        """facts: given for a server without a scheduler. Otherwise the scheduler sends them."""
        self.missing = set(roles)
        self.facts = facts
        self.tokenizer: TokenizerInfo | None = None
        self._tool_format = ModelFacts.NO_TOOLS
        self._template_variables: tuple[str, ...] = ()
        self.phase = Phase.LOADING
        self.hung: str | None = None
        self.stalled: str | None = None
        self.renewed_s = time.monotonic()

    def on_ready(self, message: Ready) -> ModelFacts | None:
        """Record a Ready. Returns the facts of the model if all roles are ready."""
        self.missing.discard(message.role)
        self.facts = message.facts or self.facts
        self.tokenizer = message.tokenizer or self.tokenizer
        self._tool_format = message.tool_format or self._tool_format
        self._template_variables = message.template_variables or self._template_variables
        if self.phase is not Phase.LOADING or self.missing or self.facts is None:
            return None
        self.facts = msgspec.structs.replace(
            self.facts,
            tool_format=self._tool_format,
            template_variables=self._template_variables,
        )
        self.phase = Phase.READY
        return self.facts

    @property
    def leaving(self) -> bool:
        """The service has received a signal to stop."""
        return self.phase in (Phase.GRACE, Phase.DRAINING, Phase.CLOSED)

    def require_accepting(self, kept: bool = False) -> ModelFacts:
        """The facts of the model. Raises NotReady with the reason why no request is accepted.

        kept: the request came on a connection that carried an earlier request. During a drain
        each response tells its client to close the connection. The last response before the drain
        did not tell this, so the server accepts one more request on such a connection.
        """
        accepting = self.phase in (Phase.READY, Phase.GRACE)
        if (accepting or (kept and self.phase is Phase.DRAINING)) and self.facts is not None:
            return self.facts
        if self.phase is Phase.LOADING:
            raise NotReady("the model is still loading")
        if self.phase is Phase.FAILED:
            raise NotReady(f"the service has failed; {after_failure()}")
        raise NotReady("the server is shutting down")


class Watchdog:
    """Detects hung and stalled workers: work is pending and no message has arrived for too long.

    An idle worker and a busy worker that sends messages are neither hung nor stalled.

    A worker is hung after `timeout_s` without a message, and TOKEN_S more for each token that it
    computes. The service then ends. A timeout of 0 means that no worker is ever hung.

    A stalled worker makes the pod not ready, so that the pod receives no new requests. The next
    message makes it ready again. A worker is stalled after STALL_S without a message, or later if
    its steps are slow: after twice its longest time between two messages so far, but at most half
    of timeout_s. A server with steps of several seconds, such as a long prefill on a CPU, is
    therefore stalled only in a step that takes more than twice its longest earlier step.
    """

    STALL_S = 3.0
    TOKEN_S = 1 / 64

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._silent_since_s: dict[str, float] = {}
        self._longest_s: dict[str, float] = {}
        self._tokens: defaultdict[str, int] = defaultdict(int)

    def expect(self, role: str, now_s: float, tokens: int = 0) -> bool:
        """Expect a message from `role` from now on. Returns False if one was expected before.

        tokens: number of tokens that the worker computes before this message. The largest number
        since its last message counts.
        """
        self._tokens[role] = max(self._tokens[role], tokens)
        if role in self._silent_since_s:
            return False
        self._silent_since_s[role] = now_s
        return True

    def heard(self, role: str, now_s: float) -> None:
        """Record a message from `role`. Further messages are still expected."""
        if role in self._silent_since_s:
            silence_s = now_s - self._silent_since_s[role]
            self._longest_s[role] = max(silence_s, self._longest_s.get(role, 0.0))
            self._silent_since_s[role] = now_s
            self._tokens[role] = 0

    def expect_nothing(self, role: str) -> None:
        """Expect nothing from `role` any more."""
        self._silent_since_s.pop(role, None)
        self._tokens[role] = 0

    def patience_s(self, role: str) -> float:
        """The seconds without a message after which the worker is hung."""
        return self._timeout_s + self._tokens[role] * self.TOKEN_S

    def hung(self, now_s: float) -> str | None:
        """A role whose worker is hung, or None."""
        if not self._timeout_s:
            return None
        silent = self._silent_since_s.items()
        return next((role for role, s in silent if now_s - s > self.patience_s(role)), None)

    def stalled(self, role: str, now_s: float) -> bool:
        """True if `role` has work and has been silent for longer than a slow step takes."""
        slow_s = min(2 * self._longest_s.get(role, 0.0), self._timeout_s / 2 or inf)
        return now_s - self._silent_since_s.get(role, now_s) > max(self.STALL_S, slow_s)
