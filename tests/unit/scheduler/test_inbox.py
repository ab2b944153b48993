"""The messages reach every rank, and an idle scheduler sleeps."""

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from minisgl.core import InvariantBroken, SamplingParams
from minisgl.core.batch import Batch, StepResult
from minisgl.message.messages import AbortReq, AddReq, LeaderStep, Shutdown, ToScheduler
from minisgl.message.queues import Receiver, Sender, endpoint
from minisgl.scheduler.inbox import FollowerInbox, LocalInbox, QueueInbox, WaitS
from minisgl.scheduler.process import config_for
from minisgl.utils.process import write_socket_key
from tests.unit.scheduler.fake_engine import EOS, FakeEngine, expected_output
from tests.unit.scheduler.fake_images import prompt_with
from tests.unit.scheduler.harness import Harness
from tests.unit.scheduler.test_scheduler import config, prompt_that_stops_after
from tests.unit.scheduler.test_timed_steps import linear_cost

BURST = 5000


def no_wait() -> float:
    return 0.0


def test_a_scheduler_on_a_cpu_reads_each_result_before_the_next_launch() -> None:
    """Regression: a launch returned with the step complete, and its tokens waited for another."""
    assert [config_for(name, config()).overlap for name in ("cpu", "NVIDIA H100")] == [False, True]
    assert not config_for("NVIDIA H100", config(overlap=False)).overlap


def _address(folder: Path) -> str:
    write_socket_key(folder)
    return endpoint(str(folder), "rank-1")


def test_a_burst_reaches_the_other_ranks_whole(tmp_path: Path) -> None:
    """PUB/SUB dropped messages beyond 1,000, and the ranks then waited forever."""
    address = _address(tmp_path)
    follower = FollowerInbox(Receiver(address, LeaderStep))
    sender: Sender[LeaderStep] = Sender(address)
    leader = LocalInbox([sender])
    sent: list[Sequence[ToScheduler]] = []
    for uid in range(BURST):  # the follower reads nothing until then
        leader.messages.append(AbortReq(uid=uid))
        sent.append(leader.receive(no_wait))
    received = [follower.receive(no_wait) for _ in range(BURST)]
    assert [list(step) for step in received] == [list(step) for step in sent]


def test_the_other_ranks_get_no_pixels(tmp_path: Path) -> None:
    """Regression: each rank got the pixels of all images, 100 MB for some requests."""
    _, images = prompt_with([1, (0, (2, 3)), 5])
    address = _address(tmp_path)
    follower = FollowerInbox(Receiver(address, LeaderStep))
    leader = LocalInbox([Sender(address)])
    message = AddReq(uid=1, token_ids=b"", sampling=SamplingParams(), images=images)
    leader.messages.append(message)
    assert leader.receive(no_wait) == [message], "rank 0 encodes"
    (received,) = follower.receive(no_wait)
    (image,) = received.images
    assert (image.digest, image.pixels) == (images[0].digest, b"")


def test_a_rank_that_missed_an_iteration_stops(tmp_path: Path) -> None:
    address = _address(tmp_path)
    follower = FollowerInbox(Receiver(address, LeaderStep))
    sender: Sender[LeaderStep] = Sender(address)
    sender.send(LeaderStep(iteration=2, messages=[Shutdown()]))
    with pytest.raises(InvariantBroken, match="iteration 2"):
        follower.receive(no_wait)


def test_ranks_that_plan_differently_stop(tmp_path: Path) -> None:
    address = _address(tmp_path)
    follower = FollowerInbox(Receiver(address, LeaderStep))
    leader = LocalInbox([Sender(address)])
    hashes = []
    for prompt in ([1, 2, 3], [1, 2, 3, 4]):
        harness = Harness(FakeEngine(16, 4), config(check_plans=True))
        harness.add(prompt)
        harness.step()
        hashes.append(harness.scheduler._plan_hash)
    assert None not in hashes
    leader.receive(no_wait, plan_hash=hashes[0])
    assert follower.receive(no_wait, plan_hash=hashes[0]) == []
    leader.receive(no_wait, plan_hash=hashes[0])
    with pytest.raises(InvariantBroken, match="planned different steps"):
        follower.receive(no_wait, plan_hash=hashes[1])


class Arrivals:
    """A receiver to which messages come at given times of its own clock."""

    def __init__(self, *times_s: float) -> None:
        self.now_s = 0.0
        self.due = deque((time_s, AbortReq(uid=uid)) for uid, time_s in enumerate(times_s))

    def poll(self, timeout_s: float | None) -> None:
        end_s = self.due[0][0] if timeout_s is None else self.now_s + timeout_s
        self.now_s = max(self.now_s, min(end_s, self.due[0][0]) if self.due else end_s)

    def drain(self) -> Iterator[AbortReq]:
        while self.due and self.due[0][0] <= self.now_s:
            yield self.due.popleft()[1]


@pytest.mark.parametrize(
    ("wait_s", "uids", "now_s"),
    [(None, [0, 1], 0.003), (0.0, [], 0.0), (0.002, [], 0.002), (0.008, [0, 1], 0.003)],
)
def test_the_first_message_ends_the_wait(
    wait_s: float | None, uids: list[int], now_s: float
) -> None:
    """The host takes several ms to launch a step with a prompt, so the launch starts at once."""
    receiver = Arrivals(0.003, 0.003, 0.0064)
    assert [message.uid for message in QueueInbox(receiver).receive(lambda: wait_s)] == uids
    assert receiver.now_s == pytest.approx(now_s)


class RecordingInbox(LocalInbox):
    """Records wait_s of each call of the scheduler."""

    def __init__(self, harness: Harness) -> None:
        super().__init__()
        self.waits_s: list[float | None] = []
        self.messages = harness.inbox.messages
        harness.scheduler._inbox = self

    def receive(
        self, wait_s: WaitS, plan_hash: int | None = None, own: Sequence[ToScheduler] = ()
    ) -> Sequence[ToScheduler]:
        self.waits_s.append(wait_s())
        return super().receive(wait_s, plan_hash, own)


def test_an_idle_scheduler_blocks_and_a_busy_one_does_not() -> None:
    """With a request that could never be admitted, the loop used 100 % of a core."""
    harness = Harness(FakeEngine(16, 4), config())
    inbox = RecordingInbox(harness)
    harness.add([1, 2, 3], max_tokens=3, ignore_eos=True)
    harness.run()
    harness.scheduler.iterate()
    first, *busy, last = inbox.waits_s
    assert first is None, "idle before the first message"
    assert busy
    assert set(busy) == {0.0}, "no wait while a request runs"
    assert last is None, "idle again at the end"


class SlowEngine(FakeEngine):
    """A step takes 10 ms of a simulated clock. The clock advances when a result is read."""

    now_s = 0.0

    def _run(self, batch: Batch) -> StepResult:
        self.now_s += 0.010
        return super()._run(batch)


@pytest.mark.parametrize(
    ("target_ms", "eager", "waits"),
    [(20.0, False, True), (None, False, False), (20.0, True, False)],
)
def test_a_request_that_arrives_while_others_decode_is_in_the_next_step(
    target_ms: float | None, eager: bool, waits: bool
) -> None:
    """The next step is planned 2 ms before the step in flight ends.

    It is planned at once while prompts wait, without a step-time target, and when the device has
    nothing to do.
    """
    engine = SlowEngine(64, 4, eager=eager)
    harness = Harness(engine, config(target_step_ms=target_ms, prefill_budget_tokens=8))
    inbox = RecordingInbox(harness)
    harness.scheduler._meter.clock = lambda: engine.now_s
    harness.scheduler.view.cost = linear_cost(0.0119)
    harness.add([1, 2, 3], max_tokens=40, ignore_eos=True)
    for _ in range(5):
        harness.scheduler.iterate()
    assert inbox.waits_s[-1] == (pytest.approx(0.008) if waits else 0.0)
    harness.add(list(range(1, 25)), max_tokens=1, ignore_eos=True)
    harness.scheduler.iterate()
    chunks = [len(batch.chunk_ids) for batch in engine.batches[-1:]]
    assert chunks == [8], "planned in the iteration in which it arrived"
    inbox.waits_s.clear()
    for _ in range(2):
        harness.scheduler.iterate()
    assert inbox.waits_s == [0.0, 0.0], "no wait before its other chunks"
    harness.run()


def test_the_next_step_is_planned_earlier_by_the_time_of_its_masks() -> None:
    """The scheduler notices the end of a step only after the masks of the next one."""
    engine = SlowEngine(64, 4)
    harness = Harness(engine, config(target_step_ms=20.0))
    inbox = RecordingInbox(harness)
    scheduler = harness.scheduler
    scheduler._meter.clock = lambda: engine.now_s
    scheduler.view.cost = linear_cost(0.0119)
    launch = engine.launch

    def launch_with_masks(batch: Batch) -> Any:
        scheduler.totals.constraints.mask_seconds += 0.003
        return launch(batch)

    engine.launch = launch_with_masks
    harness.add([1, 2, 3], max_tokens=40, ignore_eos=True)
    for _ in range(5):
        scheduler.iterate()
    assert inbox.waits_s[-1] == pytest.approx(0.005)


def test_every_eos_id_ends_a_req() -> None:
    """Only one EOS id was known, so models with several ids generated up to max_tokens."""
    prompt = prompt_that_stops_after(6)
    plain = expected_output(prompt, 20, ignore_eos=True)
    second_eos = plain[2]
    assert second_eos != EOS
    harness = Harness(FakeEngine(32, 4), config(), eos_token_ids=(EOS, second_eos))
    uid = harness.add(prompt, max_tokens=20)
    harness.run()
    assert harness.answers[uid].tokens == plain[: plain.index(second_eos) + 1]
