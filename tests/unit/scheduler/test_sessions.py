"""The end of a session: evictions begin with the pages that only its requests have used."""

from minisgl.kvcache.node import NodeClass
from minisgl.message.messages import EndSession
from tests.unit.scheduler.fake_engine import FakeEngine
from tests.unit.scheduler.harness import Harness
from tests.unit.scheduler.integrity import nodes_of


def test_the_end_of_a_session_gives_up_only_what_no_other_request_used() -> None:
    harness = Harness(FakeEngine(num_pages=16, page_size=4))

    def cached(prompt: list[int], session: str) -> int:
        uid = harness.add(prompt, session=session, max_tokens=1)
        harness.run()
        return harness.answers[uid].cached_tokens

    system = [*range(3, 11)]
    of_a, of_b = [*system, *range(11, 23)], [*system, *range(23, 35)]
    cached(of_b, "b")  # the least recently used, so its pages would go first
    cached(of_a, "a")
    harness.inbox.messages.append(EndSession(session="a"))
    cached([*range(35, 51)], "c")
    assert harness.scheduler.stats().ended_pages_total == 3
    cached([60] * 27, "c")  # needs three pages more than are free
    assert cached([*of_b, 1], "b") == 20
    assert cached([*of_a, 1], "a") == 8, "the shared prefix stays, the rest has gone"


def test_a_session_that_ends_while_its_request_runs_gives_up_the_answer_too() -> None:
    harness = Harness(FakeEngine(num_pages=64, page_size=4))
    harness.add([*range(3, 19)], session="a", max_tokens=8, ignore_eos=True)
    while not nodes_of(harness.scheduler.memory.tree):
        harness.step()
    harness.inbox.messages.append(EndSession(session="a"))
    harness.run()
    ended = {node.kept_as: len(node.pages) for node in nodes_of(harness.scheduler.memory.tree)}
    assert sum(ended.values()) >= 1
    assert {*ended} == {NodeClass.ENDED}
    assert len(nodes_of(harness.scheduler.memory.tree)) == 2, "the prompt and the answer"
