"""How messages reach the ranks, and that an idle scheduler sleeps."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from minisgl.core import InvariantBroken
from minisgl.message import Receiver, Sender, endpoint
from minisgl.message.wire import AbortReq, LeaderStep, Shutdown, ToScheduler
from minisgl.scheduler.io import FollowerInbox, LeaderInbox, LocalInbox
from tests.unit.scheduler.fake_engine import EOS, FakeEngine, expected_output
from tests.unit.scheduler.harness import Harness
from tests.unit.scheduler.test_scheduler import config, prompt_that_stops_after

BURST = 5000


def test_a_burst_reaches_the_other_ranks_whole(tmp_path: Path) -> None:
    """W20: PUB/SUB dropped what exceeded 1,000 messages, and ranks then waited for ever."""
    address = endpoint(str(tmp_path), "rank-1")
    follower = FollowerInbox(Receiver(address, LeaderStep))
    sender: Sender[LeaderStep] = Sender(address)
    local = LocalInbox()
    leader = LeaderInbox(local, [sender])
    sent: list[Sequence[ToScheduler]] = []
    for uid in range(BURST):  # the follower reads nothing meanwhile
        local.messages.append(AbortReq(uid=uid))
        sent.append(leader.receive(block=False))
    received = [follower.receive(block=False) for _ in range(BURST)]
    assert [list(step) for step in received] == [list(step) for step in sent]


def test_a_rank_that_missed_an_iteration_stops(tmp_path: Path) -> None:
    address = endpoint(str(tmp_path), "rank-1")
    follower = FollowerInbox(Receiver(address, LeaderStep))
    sender: Sender[LeaderStep] = Sender(address)
    sender.send(LeaderStep(iteration=2, messages=[Shutdown()]))
    with pytest.raises(InvariantBroken, match="iteration 2"):
        follower.receive(block=False)


def test_ranks_that_plan_differently_stop(tmp_path: Path) -> None:
    address = endpoint(str(tmp_path), "rank-1")
    follower = FollowerInbox(Receiver(address, LeaderStep))
    leader = LeaderInbox(LocalInbox(), [Sender(address)])
    hashes = []
    for prompt in ([1, 2, 3], [1, 2, 3, 4]):
        harness = Harness(FakeEngine(16, 4), config(check_plans=True))
        harness.add(prompt)
        harness.step()
        hashes.append(harness.scheduler._plan_hash)
    assert None not in hashes
    leader.receive(block=False, plan_hash=hashes[0])
    assert follower.receive(block=False, plan_hash=hashes[0]) == []
    leader.receive(block=False, plan_hash=hashes[0])
    with pytest.raises(InvariantBroken, match="planned different steps"):
        follower.receive(block=False, plan_hash=hashes[1])


def test_an_idle_scheduler_blocks_and_a_busy_one_does_not() -> None:
    """W16: with a request that was never admissible, the loop spun at 100 % CPU."""

    class Watched(LocalInbox):
        def __init__(self) -> None:
            super().__init__()
            self.blocking: list[bool] = []

        def receive(self, block: bool, plan_hash: int | None = None) -> Sequence[ToScheduler]:
            self.blocking.append(block)
            return super().receive(block, plan_hash)

    harness = Harness(FakeEngine(16, 4), config())
    watched = Watched()
    watched.messages = harness.inbox.messages
    harness.scheduler._inbox = watched
    harness.add([1, 2, 3], max_tokens=3, ignore_eos=True)
    harness.run()
    harness.scheduler.iterate()
    assert watched.blocking[0], "idle before the first message"
    assert not any(watched.blocking[1:-1]), "never while something runs"
    assert watched.blocking[-1], "idle again at the end"


def test_every_eos_id_ends_a_req() -> None:
    """W6: only one EOS id was known, so models with several ran on to max_tokens."""
    prompt = prompt_that_stops_after(6)
    plain = expected_output(prompt, 20, ignore_eos=True)
    second_eos = plain[2]
    assert second_eos != EOS
    harness = Harness(FakeEngine(32, 4), config(), eos_token_ids=(EOS, second_eos))
    uid = harness.add(prompt, max_tokens=20)
    harness.run()
    assert harness.answers[uid].tokens == plain[: plain.index(second_eos) + 1]
