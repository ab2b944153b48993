"""Runs cases of the scheduler one after the other, on all ranks of one process group."""

import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from minisgl.core import EngineConfig, SamplingParams, SchedulerConfig
from minisgl.core.batch import Batch, PendingStep
from minisgl.distributed.comm import Communicator
from minisgl.engine import Engine
from minisgl.message.messages import AbortReq, AddReq, LeaderStep, Shutdown
from minisgl.message.queues import Receiver, Sender, endpoint
from minisgl.scheduler import LocalInbox, Scheduler
from minisgl.scheduler.inbox import FollowerInbox, Inbox
from minisgl.utils.process import write_socket_key
from tests.parity.driver import with_drafts
from tests.parity.models import VOCAB_SIZE
from tests.unit.distributed.ranks import run_ranks
from tests.unit.scheduler.drafts import ChangingDrafts
from tests.unit.scheduler.integrity import check_scheduler

__all__ = ["OUTPUT_TOKENS", "Outcome", "RankCase", "prompts", "prove", "run_cases", "run_on"]

OUTPUT_TOKENS = 12
UNLIMITED = 8192


@dataclass(frozen=True)
class RankCase:
    """One run of one or two waves of requests; settings of the scheduler and the engine, and:

    crowded  the KV pool is so small that requests are preempted.
    aborts   requests of the second wave are aborted at random.
    drawn    tokens are drawn at random, with `temperature`, instead of greedily.
    drafts   steps have n-gram drafts, or those of a draft head (speculative in `engine`).
    kv       kv_cache_dtype of the engine.
    """

    family: str
    chunk: int
    cache_type: str
    overlap: bool
    crowded: bool
    aborts: bool
    page_size: int = 4
    drawn: bool = False
    drafts: bool = False
    temperature: float = 1.2
    kv: str = "auto"
    engine: dict[str, Any] = field(default_factory=dict)

    @property
    def waves(self) -> int:
        """The second wave finds cached prefixes, has the aborts, and draws from all logits."""
        return 2 if self.cache_type == "radix" or self.aborts or self.drawn else 1

    def __str__(self) -> str:
        chosen = [self.cache_type, "overlap" if self.overlap else "plain"]
        chosen += [name for name in ("crowded", "aborts", "drawn", "drafts") if getattr(self, name)]
        chosen += [self.kv] if self.kv == "fp8" else []
        return f"{self.family}-chunk{self.chunk}-{'-'.join(chosen)}"


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    tokens  output tokens of each uid, in the order of the waves.
    totals  counters of scheduler and steps.
    """

    tokens: list[list[int]]
    totals: dict[str, int]


def prompts() -> list[list[int]]:
    """Five prompts of 20 to 60 tokens; most share a prefix with another one."""
    rng = np.random.default_rng(7)
    stem = rng.integers(3, VOCAB_SIZE, 40).tolist()
    lengths = [(40, 20), (23, 17), (40, 3), (0, 25), (23, 17)]
    return [stem[:shared] + rng.integers(3, VOCAB_SIZE, own).tolist() for shared, own in lengths]


class _Counted:
    """Passes steps on to the engine and counts them by kind."""

    def __init__(self, engine: Engine, totals: dict[str, int]) -> None:
        self._engine, self._totals = engine, totals
        self.num_pages, self.page_size = engine.num_pages, engine.page_size
        self.max_running_reqs, self.max_seq_len = engine.max_running_reqs, engine.max_seq_len
        self.window, self.snapshot_pages = engine.window, engine.snapshot_pages
        self.copier, self.images = engine.copier, engine.images

    def launch(self, batch: Batch) -> PendingStep:
        self._totals["partial"] += not batch.samples.all()
        self._totals["mixed"] += bool(batch.num_decode and len(batch.chunk_ids))
        return self._engine.launch(batch)


def run_on(
    size: int, cases: list[RankCase], paths: dict[str, str], folder: Path, device: str = "cpu"
) -> list[list[Outcome]]:
    """Run the cases on `size` processes; return the outcomes of each rank.

    paths: the model of each family. Each case has a folder of queues, because the ranks finish a
    case at different times. The ranks share the key of the folder.
    """
    for index in range(len(cases)):
        (folder / str(index)).mkdir()
        write_socket_key(folder / str(index))
    return run_ranks(size, folder, run_cases, str(folder), cases, paths, device=device)


def run_cases(
    comm: Communicator, folder: str, cases: list[RankCase], paths: dict[str, str]
) -> list[Outcome]:
    """Run the cases on this rank; return the outcome of each case.

    With several ranks, the queues are in the subfolders that `run_on` has made.
    """
    return [
        _run(comm, Path(folder) / str(index), case, paths[case.family])
        for index, case in enumerate(cases)
    ]


def _run(comm: Communicator, folder: Path, case: RankCase, path: str) -> Outcome:
    tokens = 80 if case.crowded else 1024
    settings: dict[str, Any] = {"model_path": path, "kv_cache_dtype": case.kv, **case.engine}
    settings = {"device": "cpu", **settings}
    config = EngineConfig(
        tp_size=comm.tp.size,
        page_size=case.page_size,
        num_pages=tokens // case.page_size,
        max_running_reqs=4,
        **settings,
    )
    head = config.speculative == "mtp"
    drafts = ChangingDrafts(7, head=head) if case.drafts else None
    engine = Engine(config, comm, extensions=with_drafts(drafts, config.speculative))
    totals = {"partial": 0, "mixed": 0}
    source, outbox = LocalInbox(), deque()
    names = [endpoint(str(folder), f"rank-{rank}") for rank in range(1, comm.tp.size)]
    inbox: Inbox = source
    senders: list[Sender[LeaderStep]] = []
    if comm.tp.rank:
        steps: Receiver[LeaderStep] = Receiver(names[comm.tp.rank - 1], LeaderStep)
        inbox = FollowerInbox(steps)
    elif names:
        senders = [Sender(name, linger_ms=60_000) for name in names]
        inbox = source = LocalInbox(senders)
    scheduler = Scheduler(
        _Counted(engine, totals),  # type: ignore[arg-type]
        SchedulerConfig(
            prefill_budget_tokens=case.chunk,
            target_step_ms=None,
            cache_type=case.cache_type,
            overlap=case.overlap,
            check_plans=True,
        ),
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(2,),
        inbox=inbox,
        send=outbox.append,
        extensions=engine.extensions,
    )
    if comm.tp.rank:
        while not scheduler.stopping:
            scheduler.iterate()
        steps.close()
    else:
        _lead(scheduler, source, case)
        for sender in senders:
            sender.close()
    outputs: dict[int, list[int]] = {uid: [] for uid in range(case.waves * len(prompts()))}
    for output in outbox:
        for uid, token in zip(output.uids, output.token_ids, strict=True):
            outputs[uid].append(token)
    engine.close()
    if drafts is not None:
        totals |= {"drafted": drafts.drafted, "agreed": drafts.agreed}
    for name in ("cached_tokens_total", "preemptions_total", "overlapped_steps_total"):
        totals[name] = getattr(scheduler.totals, name)
    return Outcome([outputs[uid] for uid in sorted(outputs)], totals)


def _lead(scheduler: Scheduler, source: LocalInbox, case: RankCase) -> None:
    chance = random.Random(5)
    count = len(prompts())
    for wave in range(case.waves):
        uids = range(wave * count, (wave + 1) * count)
        texts = [np.array(prompt, dtype="<i4").tobytes() for prompt in prompts()]
        for uid, ids, other in zip(uids, texts, reversed(texts), strict=True):
            message = AddReq(
                uid=uid, token_ids=ids, sampling=_sampling(case, uid), prediction=other
            )
            source.messages.append(message)
        while source.messages or not scheduler.idle:
            if case.aborts and wave and chance.random() < 0.15:
                source.messages.append(AbortReq(uid=chance.choice(uids)))
            scheduler.iterate()
            check_scheduler(scheduler)
    source.messages.append(Shutdown())
    scheduler.iterate()


def _sampling(case: RankCase, uid: int) -> SamplingParams:
    if not case.drawn:
        return SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    # In wave one each rank samples from its part of the logits, in wave two from all logits.
    count = len(prompts())
    asked: dict[str, Any] = {}
    if uid == count + 1:
        asked = {"frequency_penalty": 0.7, "logprobs": 2}
    elif uid >= count and uid % 2:
        asked = {"top_k": 20, "top_p": 0.9}
    return SamplingParams(
        temperature=case.temperature,
        max_tokens=OUTPUT_TOKENS,
        ignore_eos=True,
        seed=uid % count,
        **asked,
    )


def prove(case: RankCase, outcome: Outcome) -> None:
    """Assert that the run had exactly the events of its case, such as preemptions and aborts."""
    totals = outcome.totals
    assert (totals["cached_tokens_total"] > 0) == (case.cache_type == "radix")
    assert (totals["preemptions_total"] > 0) == case.crowded
    assert (totals["overlapped_steps_total"] > 0) == case.overlap
    assert (totals["partial"] > 0) == (case.chunk < UNLIMITED)
    assert totals["mixed"] > 0 or case.chunk == UNLIMITED
    assert not case.drafts or totals["drafted"] > 0
    lengths = [len(tokens) for tokens in outcome.tokens]
    assert lengths[: len(prompts())] == [OUTPUT_TOKENS] * len(prompts())
    assert (min(lengths) < OUTPUT_TOKENS) == case.aborts
