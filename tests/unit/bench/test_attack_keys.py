"""The attacks with a key: their calls, and the bar for the other key."""

import json
import math

import pytest

from bench.attack_keys import KEY_ATTACKS, KeyFound


@pytest.mark.parametrize("name", KEY_ATTACKS)
def test_calls_of_an_attack_differ_from_each_other(name: str) -> None:
    """The server would answer equal calls from its cache of compiled grammars."""
    bodies = {json.dumps(KEY_ATTACKS[name].body(number)) for number in range(3)}
    assert len(bodies) == 3


@pytest.mark.parametrize(
    ("alone_ms", "beside_ms", "step_ms", "holds"),
    [(20, 55, 15, True), (20, 56, 15, False), (20, math.inf, 0, False)],
)
def test_bar_is_two_times_the_idle_time_and_a_step(
    alone_ms: float, beside_ms: float, step_ms: float, holds: bool
) -> None:
    found = KeyFound(alone_ms, beside_ms, step_ms)
    assert (found.beside_p95_ms <= found.bar_ms) is holds
