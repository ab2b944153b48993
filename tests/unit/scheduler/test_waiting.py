"""The order of service in the queue of one scheduler."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from minisgl.core import SamplingParams
from minisgl.scheduler.request import Req
from minisgl.scheduler.waiting import WaitingQueue


def waiting(*names: str) -> WaitingQueue:
    """A queue of requests that arrived in this order; the name "a2" is call 2 of client a."""
    queue = WaitingQueue()
    for index, name in enumerate(names):
        tokens = np.arange(3, dtype=np.int32)
        req = Req(index, tokens, 3, 4, SamplingParams(), index, client=name[0], call=int(name[1]))
        queue.append(req)
    return queue


def served(queue: WaitingQueue) -> list[str]:
    """Serve one client after the other, and return the names in this order."""
    order = []
    while len(queue):
        for client in sorted({client for _, client in queue.uncached_tokens}):
            req = next(iter(queue.of(client)))
            queue.remove(req)
            order.append(f"{req.client}{req.call}")
    return order


def test_one_client_with_one_call_is_first_in_first_out() -> None:
    queue = waiting("a0", "a0", "a0")
    assert [req.uid for req in queue] == [0, 1, 2]
    assert [req.uid for req in reversed(queue)] == [2, 1, 0]


def test_calls_of_one_choice_are_served_in_order_of_arrival() -> None:
    assert served(waiting("a3", "a1", "a2")) == ["a3", "a1", "a2"]


def test_calls_take_turns_within_a_client() -> None:
    queue = waiting("a1", "a1", "a1", "a2", "a3", "a3")
    assert [f"{req.client}{req.call}" for req in queue] == ["a1", "a2", "a3", "a1", "a3", "a1"]
    assert served(queue) == ["a1", "a2", "a3", "a1", "a3", "a1"]


def test_clients_take_turns() -> None:
    queue = waiting("a1", "a2", "a3", "b4", "b5", "c6")
    assert served(queue) == ["a1", "b4", "c6", "a2", "b5", "a3"]


def test_a_preempted_request_comes_first_within_its_client_only() -> None:
    queue = waiting("a1", "b2")
    tokens = np.arange(3, dtype=np.int32)
    back = Req(9, tokens, 3, 4, SamplingParams(), 9, client="b", call=7, admitted=True)
    queue.append(back)
    assert [req.uid for req in queue] == [0, 9, 1]
    queue.remove(back)
    assert [req.uid for req in queue] == [0, 1]
    assert {client for _, client in queue.uncached_tokens} == {"a", "b"}


@given(
    st.lists(st.sampled_from(["a1", "a2", "a3"]), max_size=9),
    st.lists(st.integers(0, 8), max_size=5, unique=True),
)
def test_a_plan_sees_the_order_after_its_own_admissions(names: list[str], taken: list[int]) -> None:
    """Without removing them, because a plan changes nothing."""
    queue = waiting(*names)
    reqs = list(queue)
    admitted = [reqs[index] for index in taken if index < len(reqs)]
    order = [*queue.of("a", 0, admitted)]
    for req in admitted:
        queue.remove(req)
    assert order == [*queue.of("a")]
