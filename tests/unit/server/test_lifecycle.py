"""Phases that accept requests, and the detection of hung and stalled workers."""

import pytest

from minisgl.message.messages import Ready
from minisgl.server.errors import NotReady
from minisgl.server.observe.lifecycle import Lifecycle, Phase, Watchdog
from tests.unit.server.fakes import FACTS


def test_ready_needs_every_role_and_the_facts() -> None:
    lifecycle = Lifecycle(frozenset({"scheduler", "detokenizer"}))
    assert not lifecycle.on_ready(Ready(role="scheduler", facts=FACTS))
    with pytest.raises(NotReady, match="loading"):
        lifecycle.require_accepting()
    assert lifecycle.on_ready(Ready(role="detokenizer"))
    assert lifecycle.require_accepting() == FACTS


def test_grace_accepts_and_draining_refuses() -> None:
    lifecycle = Lifecycle(frozenset({"scheduler"}))
    lifecycle.on_ready(Ready(role="scheduler", facts=FACTS))
    lifecycle.phase = Phase.GRACE
    assert lifecycle.require_accepting() == FACTS
    lifecycle.phase = Phase.DRAINING
    with pytest.raises(NotReady, match="shutting down"):
        lifecycle.require_accepting()
    assert lifecycle.require_accepting(kept=True) == FACTS
    lifecycle.phase = Phase.CLOSED
    with pytest.raises(NotReady, match="shutting down"):
        lifecycle.require_accepting(kept=True)


def test_silent_worker_hangs_and_busy_or_idle_worker_does_not() -> None:
    watchdog = Watchdog(10.0)
    watchdog.heard("tokenizer-0", 0.0)
    assert watchdog.hung(1000.0) is None, "nothing is expected"
    assert watchdog.expect("tokenizer-0", 1000.0)
    assert not watchdog.expect("tokenizer-0", 1001.0), "one ping at a time"
    watchdog.heard("tokenizer-0", 1009.0)  # the result of a request before the ping
    assert watchdog.hung(1018.0) is None
    assert watchdog.hung(1019.5) == "tokenizer-0"
    watchdog.expect_nothing("tokenizer-0")
    assert watchdog.hung(2000.0) is None
    assert watchdog.expect("tokenizer-0", 2000.0)


def test_patience_grows_with_the_tokens_of_the_step() -> None:
    """Regression: a chunk of 8,192 tokens on a CPU took more than a minute and ended the server."""
    watchdog = Watchdog(60.0)
    watchdog.expect("scheduler", 100.0, tokens=6400)
    watchdog.expect("scheduler", 101.0, tokens=0)  # the client of the step has disconnected
    assert watchdog.hung(259.0) is None
    assert watchdog.hung(261.0) == "scheduler"
    assert watchdog.patience_s("scheduler") == 160.0
    watchdog.heard("scheduler", 300.0)
    assert watchdog.hung(359.0) is None
    assert watchdog.hung(361.0) == "scheduler", "the next step has no such tokens"


@pytest.mark.parametrize("cluster", [False, True])
def test_only_in_kubernetes_a_failed_service_restarts(
    monkeypatch: pytest.MonkeyPatch, cluster: bool
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    if cluster:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    lifecycle = Lifecycle(frozenset())
    lifecycle.phase = Phase.FAILED
    with pytest.raises(NotReady) as error:
        lifecycle.require_accepting()
    end = "Kubernetes restarts it" if cluster else "it ends, and its log has the reason"
    assert error.value.message == f"the service has failed; {end}"


def test_step_timeout_zero_reports_stalls_and_no_hangs() -> None:
    never = Watchdog(0.0)
    never.expect("scheduler", 0.0)
    assert never.hung(1e9) is None
    assert never.stalled("scheduler", 1e9)


def test_worker_stalls_after_seconds_of_silence_and_recovers_with_a_message() -> None:
    watchdog = Watchdog(60.0)
    assert not watchdog.stalled("scheduler", 100.0), "nothing is expected"
    watchdog.expect("scheduler", 100.0)
    assert not watchdog.stalled("scheduler", 103.0)
    assert watchdog.stalled("scheduler", 103.1)
    assert watchdog.hung(103.1) is None, "liveness waits for the whole timeout"
    watchdog.heard("scheduler", 103.2)
    assert not watchdog.stalled("scheduler", 103.3)


def test_server_with_slow_steps_is_not_stalled_by_each_of_them() -> None:
    watchdog = Watchdog(60.0)
    watchdog.expect("scheduler", 0.0)
    watchdog.heard("scheduler", 5.0)
    assert not watchdog.stalled("scheduler", 14.9), "a step of 9.9 s after one of 5 s"
    watchdog.heard("scheduler", 45.0)
    assert not watchdog.stalled("scheduler", 74.9)
    assert watchdog.stalled("scheduler", 75.1), "half of the timeout, for steps however slow"
