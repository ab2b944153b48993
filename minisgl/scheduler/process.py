"""The main function of a scheduler process: one engine, one scheduler, its queues."""

import gc
import logging
import time
from collections.abc import Callable
from pathlib import Path

from minisgl.core import EngineConfig, SchedulerConfig
from minisgl.distributed import TPInfo, connect
from minisgl.engine import DEFAULT_EXTENSIONS, Engine, Extensions, resolve_device
from minisgl.message import (
    LeaderStep,
    Ready,
    Receiver,
    SchedulerStats,
    Sender,
    StepOutput,
    ToScheduler,
    endpoint,
)
from minisgl.scheduler.inbox import FollowerInbox, Inbox, LeaderInbox, QueueInbox
from minisgl.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.05  # endpoint pickers look as often


def run_scheduler(
    engine_config: EngineConfig,
    scheduler_config: SchedulerConfig,
    *,
    tp_rank: int,
    socket_dir: str,
    extensions: Extensions = DEFAULT_EXTENSIONS,
) -> None:
    """Load, say Ready, and run until Shutdown. Raises ConfigError or EngineError.

    Rank 0 binds `scheduler` and pushes to `detokenizer` and `api`; rank i binds `rank-{i}`.
    """
    tp = TPInfo(tp_rank, engine_config.tp_size)
    # bound before loading, so that nothing sent meanwhile is lost and nothing has to retry
    inbox = _inbox(tp, socket_dir)
    rendezvous = str(Path(socket_dir) / "rendezvous")
    comm = connect(tp, resolve_device(engine_config, tp), rendezvous)
    engine = Engine(engine_config, comm, scheduler_config.prefill_budget_tokens, extensions)
    api: Sender[Ready | SchedulerStats] = Sender(endpoint(socket_dir, "api"))
    send: Callable[[StepOutput], object] = _say_nothing
    if tp.rank == 0:
        send = Sender[StepOutput](endpoint(socket_dir, "detokenizer")).send
    constructed_s = time.monotonic()
    scheduler = build_scheduler(engine, scheduler_config, inbox, send)
    gc.collect()
    gc.freeze()  # what is loaded stays; collections look at requests only
    name = "scheduler" if tp.rank == 0 else f"scheduler-{tp.rank}"
    startup_s = {**engine.startup_s, "warm_up": time.monotonic() - constructed_s}
    facts = engine.facts() if tp.rank == 0 else None
    api.send(Ready(role=name, facts=facts, startup_s=startup_s))
    _loop(scheduler, api if tp.rank == 0 else None)
    comm.close()
    logger.info("scheduler stopped")


def build_scheduler(
    engine: Engine, config: SchedulerConfig, inbox: Inbox, send: Callable[[StepOutput], object]
) -> Scheduler:
    """A warmed-up scheduler around `engine`, calibrated if somebody asks what steps cost: with a
    target, and on GPUs always (a CPU takes 2 s for it)."""
    facts = engine.facts()
    scheduler = Scheduler(
        engine,
        config,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        inbox=inbox,
        send=send,
        extensions=engine.extensions,
    )
    engine.warm_up()
    if config.target_step_ms is not None or facts.device != "cpu":
        scheduler.planner.cost = engine.calibrate()
        logger.info("step cost calibrated cost=%s", scheduler.planner.cost)
    return scheduler


def _loop(scheduler: Scheduler, api: Sender[Ready | SchedulerStats] | None) -> None:
    """api: who is told how it goes; None where another rank tells it."""
    sent_at = -STATS_INTERVAL_S
    while not scheduler.stopping:
        scheduler.iterate()
        now = time.monotonic()
        if api is not None and (scheduler.idle or now - sent_at >= STATS_INTERVAL_S):
            api.send(scheduler.stats())
            sent_at = now
    scheduler.drain_in_flight()


def _say_nothing(output: StepOutput) -> None:
    """Ranks 1..n-1: their outputs equal those of rank 0, who speaks."""


def _inbox(tp: TPInfo, socket_dir: str) -> Inbox:
    if tp.rank > 0:
        return FollowerInbox(Receiver(endpoint(socket_dir, f"rank-{tp.rank}"), LeaderStep))
    source = QueueInbox(Receiver(endpoint(socket_dir, "scheduler"), ToScheduler))
    if tp.size == 1:
        return source
    return LeaderInbox(
        source, [Sender(endpoint(socket_dir, f"rank-{rank}")) for rank in range(1, tp.size)]
    )
