"""`View`, the input of a plan, and `StepPlan`, its result."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from minisgl.core import SchedulerConfig, StepCost, StepWork, step_sizes
from minisgl.core.batch import DraftLengths, EngineLike, Int32Array
from minisgl.core.config import MAX_DRAFTS
from minisgl.engine import Extensions
from minisgl.kvcache.lookup import common_prefix
from minisgl.kvcache.memory import Memory
from minisgl.kvcache.node import CacheListener, Hit
from minisgl.scheduler.image_room import Passed
from minisgl.scheduler.images import EncodePart, Images
from minisgl.scheduler.request import Req
from minisgl.scheduler.request_table import RequestTable
from minisgl.scheduler.waiting import Shares, WaitingQueue


class Carry(NamedTuple):
    """The counters that one plan hands on to the next.

    overtakes     admissions that overtook the longest delayed request.
    paused_steps  steps in a row without the decoding requests of later priorities.
    passed        a request without a chunk, because its image would exceed the budget beside the
                  chunks of others.
    """

    overtakes: int = 0
    paused_steps: int = 0
    passed: Passed = Passed()


NO_CARRY = Carry()


class Decode(NamedTuple):
    """Rows that decode, int32, and the tokens of each. next_drafts: as Batch.next_drafts."""

    rows: Int32Array
    tokens: Int32Array
    next_drafts: int = 0

    def only(self, kept: NDArray[np.bool_]) -> "Decode":
        """The rows at which `kept`, a bool for each row, is True."""
        if kept.all():
            return self
        return Decode(self.rows[kept], self.tokens[kept], self.next_drafts)


class StepPlan(NamedTuple):
    """One step, and the changes before it.

    decode   the rows that decode in the step.
    grow     int32; the decoding rows that get pages. This step may leave some of them out.
    pages    int32; the number of pages of each.
    chunks   the next tokens of each prompt, or forced tokens, in the order of the batch.
    admit    waiting requests that get a row, in order, each with its cached prefix.
    seen     the requests whose cached prefix was looked up, in order.
    preempt  a request that loses its row and its pages, because others need them.
    encode   images of which the step computes layers of the encoder first.
    load     waiting requests whose cached prefixes are loaded from host memory first.
    """

    decode: Decode
    grow: Int32Array
    pages: Int32Array
    chunks: Mapping[Req, int] = {}
    admit: Mapping[Req, Hit] = {}
    seen: Sequence[Req] = ()
    preempt: Req | None = None
    carry: Carry = NO_CARRY
    load: Sequence[Req] = ()
    encode: Sequence[EncodePart] = ()


MIN_SHARED_TOKENS = 64  # a request does not wait a step for a shorter shared prefix


class View:
    """The requests, their memory and their order. A plan reads it, and changes nothing.

    Only apply.py makes the changes of a plan. Messages and results of steps change the rest: the
    cost, the newest completed step, the prompts that are not published yet, aborts in the queue,
    and tokens. Before each plan, rules on the View itself raise a delayed request, enqueue requests
    whose loads have ended, and drop pages that no later step reads.

        loading  <--load, end of the load--> waiting

        waiting  --admit-->  prefilling  --last chunk launched-->  decoding  <-->  paused
           ^                     |                                    |              |
           +----------------- preempt --------------------------------+--------------+
                                 ^----------- forced tokens ----------+

    Each rank has one. The views of all ranks are equal, so that their plans are equal too: a view
    has no clock, no random number and no result of I/O.

    lengths      chooses the numbers of drafts. It is read only if max_drafts is not 0.
    waiting      the requests of each client in the order of service.
    prefilling   admitted requests with prompt tokens or forced tokens that are not launched yet.
    decode_rows  int32, rows of the decoding requests.
    loading      requests whose prefixes are loaded from host memory, and the last job of each.
    paused       decoding requests that skip steps until their next edit is prepared.
    images       the images in the buffer of the engine.
    sizes        the preferred sizes of a step in tokens, in rising order.
    cost         predicts step times.

    I1  A request of the View is in exactly one place: waiting, loading, prefilling, decoding,
        paused, or in state ENDING.
    I2  decode_rows holds the decoding requests with a step left to launch, in the order in which
        they began to decode.
    I3  unpublished holds the running requests whose prompt is not in the prefix cache yet, in order
        of admission.
    """

    def __init__(
        self,
        engine: EngineLike,
        config: SchedulerConfig,
        extensions: Extensions,
        table: RequestTable,
        listeners: Sequence[CacheListener],
        cost: StepCost,
    ) -> None:
        """A view without requests. listeners: of the prefix cache."""
        self.config, self.table, self.cost = config, table, cost
        new_lengths, rows = extensions.draft_lengths, engine.max_running_reqs
        self.lengths = DraftLengths() if new_lengths is None else new_lengths(rows)
        self.max_drafts = 0 if new_lengths is None else MAX_DRAFTS
        self.memory = Memory(
            engine,
            table,
            caches=config.cache_type != "naive",
            spare_tokens=self.max_drafts,
            listeners=listeners,
            kinds=extensions.cache_kinds,
        )
        self.images = Images(engine.images, table)
        self.sizes = step_sizes(config.prefill_budget_tokens + rows + 1024)
        self.waiting = WaitingQueue()
        self.prefilling: list[Req] = []
        self.unpublished: dict[Req, None] = {}  # a dict keeps the order
        self.decode_rows: Int32Array = np.empty(0, dtype=np.int32)
        self.paused: dict[Req, None] = {}
        self.loading: dict[Req, int] = {}
        self.carry = NO_CARRY

    @property
    def in_flight(self) -> bool:
        """A launched step has no result yet. Its result may free pages."""
        return self.table.steps.launched > self.table.steps.resolved

    @property
    def has_prompts(self) -> bool:
        """Requests have prompt tokens that are not launched."""
        return bool(self.prefilling or self.waiting.uncached_tokens)

    def running_rows(self) -> Int32Array:
        """Return the rows of the decoding and the admitted requests, int32."""
        prefilling: Int32Array = np.array([req.row for req in self.prefilling], dtype=np.int32)
        return np.concatenate([self.decode_rows, prefilling])

    def with_paused(self, rows: Int32Array) -> Int32Array:
        """Return decoding rows, and after them those of paused requests, int32."""
        paused: Int32Array = np.array([req.row for req in self.paused], dtype=np.int32)
        return np.concatenate([rows, paused])

    def running(self, prefilling: Iterable[Req]) -> list[Req]:
        """Return the requests that may be preempted: `prefilling`, and those that decode."""
        return [*prefilling, *map(self.table.req_at, self.decode_rows.tolist()), *self.paused]

    def has_urgent(self, prefilling: Iterable[Req]) -> bool:
        """A prompt that waits or is in `prefilling` has the first priority in use."""
        first = self.waiting.first_priority
        waits = any(level <= first for level, _ in self.waiting.uncached_tokens)
        return waits or any(map(self.waiting.is_first, prefilling))

    def shared_with_older(
        self, req: Req, cached: int, others: Iterable[Req]
    ) -> tuple[int, Req | None]:
        """Return the number of leading tokens of `req` that an older request in `others` computes.

        The older request is returned too. cached: the tokens of `req` that the cache has.
        The number is 0 if fewer than half of the uncached tokens are shared: `req` does not wait
        for so few. With this rule, the n choices of one prompt compute the prompt once. A burst of
        requests with the same system prompt computes the system prompt once.

        A request waits for older requests only, and these decrease in number. If it also waited for
        newer requests, it could wait forever: a newer request is admitted before it, computes the
        shared prefix and fails, then the next newer request does the same, and so on.
        """
        if not (self.memory.caches and req.matchable):
            return 0, None
        page_size = self.memory.page_size
        half = (len(req.tokens) - cached + 1) // 2
        min_shared = self.memory.pages_for(cached + max(half, MIN_SHARED_TOKENS)) * page_size
        # The first min_shared tokens have to be equal. Compare the last of these tokens first,
        # because most prompts differ there. The slice is empty if the prompt has fewer tokens.
        last_needed = req.tokens[min_shared - 1 : min_shared].tobytes()
        if not last_needed:
            return 0, None
        for other in others:
            older = other.arrival_index < req.arrival_index and other.cache_salt == req.cache_salt
            if other.priority > req.priority or not older:
                continue  # a request of a later priority may have to wait for `req`
            if other.tokens[min_shared - 1 : min_shared].tobytes() == last_needed:
                shared = common_prefix(req.tokens[:-1], other.tokens)
                if shared >= min_shared:
                    return shared // page_size * page_size, other
        return 0, None

    def shares(self) -> Shares:
        """Count the rows and pages of the clients."""
        pages = self.memory.table.counts
        return Shares(self.table, self.waiting, pages, self.memory.pool.size)

    def context_tokens(self, decode: Decode) -> int:
        """Return the number of keys that the decoding rows read."""
        return int(self.table.computed[decode.rows].sum())

    def work(self, decode: Decode) -> StepWork:
        """Return the work of a step of the decoding rows alone."""
        keys = self.context_tokens(decode)
        return StepWork(int(decode.tokens.sum()), keys, 0, len(decode.rows))

    def rest(self, req: Req) -> tuple[int, int]:
        """Return the start and the end of the prompt tokens that `req` has left to compute.

        The start of a waiting request is an estimate (Req.uncached_tokens).
        """
        if req.row < 0:
            return len(req.tokens) - req.uncached_tokens, len(req.tokens)
        return int(self.table.computed[req.row]), int(self.table.prefill_end[req.row])
