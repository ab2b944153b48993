"""When requests are accepted, and what counts as a hang."""

import pytest

from minisgl.message.messages import Ready
from minisgl.server.errors import NotReady
from minisgl.server.lifecycle import Lifecycle, Phase, Watchdog
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


def test_who_is_silent_hangs_but_not_who_is_busy_or_idle() -> None:
    pulse = Watchdog(10.0)
    pulse.heard("tokenizer-0", 0.0)
    assert pulse.hanging(1000.0) is None, "nothing is expected"
    assert pulse.expect("tokenizer-0", 1000.0)
    assert not pulse.expect("tokenizer-0", 1001.0), "one question at a time"
    pulse.heard("tokenizer-0", 1009.0)  # an answer to something before the ping
    assert pulse.hanging(1018.0) is None
    assert pulse.hanging(1019.5) == "tokenizer-0"
    pulse.satisfied("tokenizer-0")
    assert pulse.hanging(2000.0) is None
    assert pulse.expect("tokenizer-0", 2000.0)


def test_zero_switches_the_watch_off() -> None:
    never = Watchdog(0.0)
    never.expect("detokenizer", 0.0)
    assert never.hanging(1e9) is None
