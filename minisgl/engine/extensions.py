"""The parts that a program can add to engine and scheduler without changing this package."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from minisgl.core import SamplingParams
from minisgl.core.batch import DraftLengths
from minisgl.core.columns import SAMPLING_COLUMNS, Column
from minisgl.engine.logits_processing import LogitsProcessor, Penalties, TokenBias
from minisgl.engine.model_runner import ModelRunner
from minisgl.engine.sampler import Finish, default_finish
from minisgl.engine.stages import Stage
from minisgl.kvcache.kinds import NewKind
from minisgl.kvcache.node import CacheListener
from minisgl.message.stats import ConstraintTotals, KVEventTotals
from minisgl.models.build import ModelExtensions


class CacheReporter(CacheListener, Protocol):
    """A CacheListener that the scheduler flushes after each iteration."""

    totals: KVEventTotals

    def flush(self) -> None:
        """Send the insertions and evictions of this iteration. Must not block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extensions(ModelExtensions):
    """Extensions of the engine and the scheduler, in addition to ModelExtensions.

    An entry point passes the same object to the engine and to the scheduler.

        Extensions(
            sampling_columns=(*SAMPLING_COLUMNS, BOOST),
            logits_processors=(*DEFAULT_EXTENSIONS.logits_processors, BoostProcessor()),
        )

    sampling_columns   parameters with one value for each row of a step; must begin with
                       SAMPLING_COLUMNS, which the sampler reads.
    logits_processors  in the order in which they edit the logits.
    constraint_totals  the processor of constraints and the scheduler count in this object.
                       SchedulerStats reports it. None: the scheduler makes one.
    cache_reporters    each makes a listener of the prefix cache from page size and number of pages.
    cache_kinds        make further kinds of memory (kvcache.kinds.CacheKind).
    draft_lengths      makes the object that chooses the number of draft tokens, from the number of
                       rows. None: no step has drafts.
    stages             each makes a stage of all steps from the engine's memory, in the order in
                       which the stages run.
    finish             makes the end of the sampler.
    """

    sampling_columns: tuple[Column, ...] = SAMPLING_COLUMNS
    logits_processors: tuple[LogitsProcessor[Any], ...] = (TokenBias(), Penalties())
    constraint_totals: ConstraintTotals | None = None
    cache_reporters: tuple[Callable[[int, int], CacheReporter], ...] = ()
    cache_kinds: tuple[NewKind, ...] = ()
    draft_lengths: Callable[[int], DraftLengths] | None = None
    stages: tuple[Callable[[ModelRunner], Stage], ...] = ()
    finish: Callable[[ModelRunner], Finish] = default_finish

    def open_states(self, params: SamplingParams) -> tuple[Any, ...]:
        """Return one state per processor for a new request; empty if none edits its logits.

        Raises RequestError when a processor rejects the request.
        """
        states = tuple(processor.open(params) for processor in self.logits_processors)
        return () if all(state is None for state in states) else states


DEFAULT_EXTENSIONS = Extensions()
