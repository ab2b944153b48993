"""The main function of a scheduler process: one engine, one scheduler and their queues."""

import gc
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from minisgl.core import FREE_STEPS, EngineConfig, SchedulerConfig, StepCost
from minisgl.core.step_cost import TimedStep
from minisgl.cost.floor import cost_of, with_weights
from minisgl.cost.roofline import roofline
from minisgl.distributed.comm import TPInfo, connect
from minisgl.engine import (
    DEFAULT_EXTENSIONS,
    Engine,
    Extensions,
    check_start,
    resolve_device,
)
from minisgl.message.messages import LeaderStep, Ready, SchedulerStats, StepOutput, ToScheduler
from minisgl.message.queues import Receiver, Sender, close_queues, endpoint
from minisgl.models.build import stored_weights
from minisgl.scheduler.cost_fit import CostFit
from minisgl.scheduler.inbox import FollowerInbox, Inbox, QueueInbox
from minisgl.scheduler.scheduler import Scheduler
from minisgl.utils import process_age_s

logger = logging.getLogger(__name__)

_LINGER_MS = 1000  # a running rank reads its messages in much less time
STATS_INTERVAL_S = 0.05  # routers (endpoint pickers) scrape the metrics at this interval


def run_scheduler(
    engine_config: EngineConfig,
    scheduler_config: SchedulerConfig,
    *,
    tp_rank: int,
    socket_dir: str,
    extensions: Extensions = DEFAULT_EXTENSIONS,
    on_checked: Callable[[], None] | None = None,
) -> None:
    """Load the model, send Ready, and run until a Shutdown message.

    on_checked: rank 0 calls it when it has found no fault in the configuration, before it loads.

    socket_dir: folder of the sockets. Rank 0 binds `scheduler` and sends to `detokenizer` and
    `api`; rank i binds `rank-{i}`. Raises ConfigError or EngineError.
    """
    import_s = process_age_s(os.getpid())
    # Imports leave no garbage, so the collection before the first step may skip their objects.
    gc.freeze()
    tp = TPInfo(tp_rank, engine_config.tp_size)
    # Bind the inbox before the model loads, so that messages that are sent during the load are not
    # lost and no sender has to retry.
    inbox = _inbox(tp, socket_dir)
    if tp.rank == 0:
        check_start(engine_config, tp, extensions)
        if on_checked is not None:
            on_checked()
    rendezvous = str(Path(socket_dir) / "rendezvous")
    comm = connect(tp, resolve_device(engine_config, tp), rendezvous)
    engine = Engine(engine_config, comm, scheduler_config.prefill_budget_tokens, extensions)
    api: Sender[Ready | SchedulerStats] = Sender(endpoint(socket_dir, "api"))
    send: Callable[[StepOutput], object] = _discard
    if tp.rank == 0:
        send = Sender[StepOutput](endpoint(socket_dir, "detokenizer")).send
    # The other ranks get the step cost of rank 0 in the first message (SetStepCost).
    cost = None if tp.rank == 0 else FREE_STEPS
    config = config_for(engine.device_name, scheduler_config)
    scheduler = build_scheduler(engine, config, inbox, send, cost)
    gc.collect()
    gc.freeze()  # later collections skip all objects that exist now
    gc.enable()
    name = "scheduler" if tp.rank == 0 else f"scheduler-{tp.rank}"
    startup_s = engine.startup.seconds | {"import": import_s}
    facts = engine.facts() if tp.rank == 0 else None
    api.send(Ready(role=name, facts=facts, startup_s=startup_s))
    sent_s = -STATS_INTERVAL_S
    while not scheduler.stopping:
        scheduler.iterate()
        now_s = time.monotonic()
        if tp.rank == 0 and (scheduler.waits_for_message or now_s - sent_s >= STATS_INTERVAL_S):
            api.send(scheduler.stats())
            sent_s = now_s
    scheduler.drain_in_flight()
    comm.close()
    close_queues()  # The other ranks wait for the last LeaderStep, which has the Shutdown.
    logger.info("scheduler stopped")


def config_for(device_name: str, config: SchedulerConfig) -> SchedulerConfig:
    """Return the configuration of a scheduler on this device: without overlap on a CPU.

    There a launch returns when the step is complete. With overlap, its tokens would wait for the
    next step.
    """
    return msgspec.structs.replace(config, overlap=config.overlap and device_name != "cpu")


def build_scheduler(
    engine: Engine,
    config: SchedulerConfig,
    inbox: Inbox,
    send: Callable[[StepOutput], object],
    cost: StepCost | None = None,
) -> Scheduler:
    """Warm up `engine` and return a scheduler for it.

    cost: predicts step times. None: an estimate does, which is fitted to the measured steps.
    """
    timed = engine.warm_up()
    facts = engine.facts()
    fits = [] if cost else [CostFit(_first_cost(engine, config, timed))]
    return Scheduler(
        engine,
        config,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        inbox=inbox,
        send=send,
        extensions=engine.extensions,
        cost=cost or FREE_STEPS,
        fits=fits,
    )


def _first_cost(engine: Engine, config: SchedulerConfig, timed: Sequence[TimedStep]) -> StepCost:
    """Return the estimated step cost of an engine, from its device and the steps of its warm-up."""
    model, tp = engine.model, engine.config.tp_size
    fp8_kv = engine.facts().kv_dtype == "fp8"
    stored = stored_weights(model, engine.config.quantization, engine.extensions)
    cost = with_weights(cost_of(model, tp, fp8_kv), model, stored, tp)
    most = config.prefill_budget_tokens + engine.max_running_reqs
    return roofline(model, cost, tp, engine.device_name, timed, most)


def _discard(output: StepOutput) -> None:
    """Drop the output of ranks 1..n-1, because rank 0 sends the same output."""


def _inbox(tp: TPInfo, socket_dir: str) -> Inbox:
    if tp.rank > 0:
        return FollowerInbox(Receiver(endpoint(socket_dir, f"rank-{tp.rank}"), LeaderStep))
    followers = [endpoint(socket_dir, f"rank-{rank}") for rank in range(1, tp.size)]
    receiver: Receiver[ToScheduler] = Receiver(endpoint(socket_dir, "scheduler"), ToScheduler)
    return QueueInbox(receiver, [Sender(address, _LINGER_MS) for address in followers])
