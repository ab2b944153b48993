"""When requests are accepted, and what counts as a hang."""

import pytest

from minisgl.message import Ready, SchedulerStats
from minisgl.server.errors import NotReady
from minisgl.server.lifecycle import Lifecycle, Phase, Progress, Pulse
from tests.unit.server.fakes import FACTS


def stats(step_id: int, busy: bool) -> SchedulerStats:
    zeros = {n: 0 for n in SchedulerStats.__struct_fields__ if n not in ("step_id", "busy")}
    return SchedulerStats(step_id=step_id, busy=busy, **zeros)


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


def test_idle_is_never_a_hang() -> None:
    progress = Progress(timeout_s=60)
    progress.on_stats(stats(7, busy=False), now_s=0)
    assert not progress.hangs(pending=False, now_s=10_000)
    assert not progress.hangs(pending=True, now_s=10_059), "work has only just come"
    assert progress.hangs(pending=True, now_s=10_061)


def test_steps_are_progress_even_without_any_text() -> None:
    """A long prompt is prefilled over many steps; counting finished tokens would call it a hang."""
    progress = Progress(timeout_s=60)
    for second in range(0, 600, 30):
        progress.on_stats(stats(second, busy=True), now_s=second)
        assert not progress.hangs(pending=True, now_s=second + 29)


def test_statistics_without_a_step_are_no_progress() -> None:
    progress = Progress(timeout_s=60)
    for second in range(62):
        progress.on_stats(stats(1, busy=True), now_s=second)
    assert progress.hangs(pending=True, now_s=61)


def test_zero_switches_the_watch_off() -> None:
    progress = Progress(timeout_s=0)
    progress.on_stats(stats(1, busy=True), now_s=0)
    assert not progress.hangs(pending=True, now_s=10**6)


def test_worker_hangs_when_asked_and_silent_but_not_while_it_works_or_idles() -> None:
    pulse = Pulse(10.0)
    assert pulse.ask("tokenizer-0", 0.0)
    assert not pulse.ask("tokenizer-0", 1.0), "one question at a time"
    pulse.heard("tokenizer-0", 9.0)  # an answer to something before the ping
    assert pulse.hanging(18.0) is None
    assert pulse.hanging(19.5) == "tokenizer-0"
    pulse.heard("tokenizer-0", 20.0, answer=True)
    assert pulse.hanging(1000.0) is None
    assert pulse.ask("tokenizer-0", 1000.0)
    never = Pulse(0.0)
    never.ask("detokenizer", 0.0)
    assert never.hanging(1e9) is None
