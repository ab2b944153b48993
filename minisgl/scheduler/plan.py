"""`plan`: chooses the requests of the next step and the number of tokens of each.

A plan is a function of the View, and changes nothing. All tensor-parallel ranks therefore plan the
same steps, and a test can compare the state before and after a plan. `apply` carries a plan out.
"""

from typing import NamedTuple

import numpy as np

from minisgl.core import InvariantBroken
from minisgl.core.batch import DecodeLoad, Int32Array
from minisgl.core.config import DRAFT_WIDTHS, MAX_DRAFT_TOKENS
from minisgl.kvcache import Room
from minisgl.scheduler.filling import Filling
from minisgl.scheduler.request import Req
from minisgl.scheduler.view import Carry, Decode, StepPlan, View

MAX_PAUSES = 8  # steps in a row that leave decoding requests of later priorities out


class Drafts(NamedTuple):
    """A step with drafts. ahead: int32; the tokens of each row whose keys need pages.

    They are those of the step and those of the new drafts.
    """

    decode: Decode
    ahead: Int32Array


class Decoding(NamedTuple):
    """The decoding rows of a step.

    decode  those with pages for their next tokens.
    victim  the request to preempt for their pages, if there is one.
    admit   all rows have pages. If some have none and `victim` is None, the step in flight frees
            pages. No request is admitted until the rows have them.
    """

    decode: Decode
    victim: Req | None
    admit: bool


def plan(view: View, may_pause: bool = True) -> StepPlan:
    """Plan the next step. may_pause: it may leave decoding requests of later priorities out.

    1. Every decoding request computes its next token, and draft tokens. When pages of full
       attention run short, the step has no drafts, the oldest requests get the free pages, and the
       newest one is preempted. When another kind of memory runs short, a request gets fewer drafts,
       or leaves the step.
    2. Admitted prompts get chunks, in order of admission, up to `prompt_tokens`.
    3. Waiting requests are admitted, in the order of the queue, while prompt tokens, a row and
       pages are left. A request waits while an older request computes a prefix that both share.

    Requests with a lower priority number come first in all three parts: they get prompt tokens and
    rows before the others, and if rows or pages are short, the others are preempted for them. A
    step with prompts of the first priority in use leaves decoding requests of the others out. At
    most MAX_PAUSES steps in a row leave them out (docs/decisions/24-priorities.md).

    If several clients have prompts of one priority, each may first use an equal part of the
    step's prompt tokens. Then each client in turn may use all unused tokens. If rows or pages are
    short, Shares decides (docs/decisions/20-clients-in-turn.md). Further choices of a call that
    decodes get fewer tokens, as prompts of later priorities do: another client may wait for the end
    of the step, and the client of the call receives tokens already.

    A client that receives no tokens waits for the step in flight and for one more: a step that ends
    its first prompt has no other prompts, and no further choices that decode, if these take long.
    The next step has them.
    """
    memory, none = view.memory, view.decode_rows[:0]
    room = Room(memory, memory.available, [kind.room() for kind in memory.kinds], none, none)
    decode, victim, admit = decoding(view, room)
    if admit and not (view.prefilling or view.waiting.uncached):  # no Python loop
        return StepPlan(decode, room.grown, room.counts, carry=Carry(view.carry.overtakes))
    fill = Filling(view, room, decode, victim)
    may_pause = may_pause and view.carry.paused_steps < MAX_PAUSES
    beside = fill.beside_urgent(decode) if may_pause else decode
    left = fill.open_step(beside)
    if (passed := fill.passed_too_often) is not None:
        left -= fill.take_passed(passed, left, admit)
    else:
        fewer, first_prompts = fill.of_new_clients(decode, left)
        for (level, client), tokens in first_prompts.items():
            left -= fill.take(level, client, tokens, admit)
        if first_prompts and fill.chunks:
            return fill.plan(fewer, 1)
    for level, clients in fill.levels():
        for part in [left // len(clients), left] if len(clients) > 1 else [left]:
            for client in clients:
                left -= fill.take(level, client, min(part, left), admit)
        admit = admit and not fill.waits(level)
    fill.images.finish(left)
    if beside is decode:
        return fill.plan(decode)
    if fill.has_urgent_work() and (fill.chunks or len(beside.rows)):  # a step has tokens
        return fill.plan(beside, view.carry.paused_steps + 1)
    return plan(view, may_pause=False)  # with the budget beside all rows, since all run


def decoding(view: View, room: Room) -> Decoding:
    """Give the decoding rows memory for their next tokens, and for drafts."""
    rows = view.decode_rows
    # Each row first gets room for its next token in every further kind. Rows without it leave the
    # step. Drafts take the memory that is then left. Without full pages for all of them there are
    # no drafts.
    for kind in room.kinds:
        rows = rows[kind.grow(rows, np.ones(len(rows), dtype=np.int32)) > 0]
    complete = len(rows) == len(view.decode_rows)
    drafts = with_drafts(view, rows) if view.max_drafts else None
    if drafts is not None and not len(room.grow(rows, drafts.ahead)):
        decode = drafts.decode
        for kind in room.kinds:
            decode = decode._replace(tokens=kind.grow(rows, decode.tokens))
        return Decoding(decode, None, complete)
    decode = Decode(rows, np.ones(len(rows), dtype=np.int32))
    growing = room.grow(rows, decode.tokens)
    if len(growing):
        return Decoding(*shortage(view, room, decode, growing), admit=False)
    return Decoding(decode, None, complete)


def with_drafts(view: View, rows: Int32Array) -> Drafts | None:
    """Return the step of these rows with drafts; None if it has none.

    The engine finds and checks the drafts on the device, so the host learns one step later how many
    tokens a step gave to a request. Until then it counts all drafts as accepted: table.computed is
    an upper bound, and a request has pages up to it. Nothing is rolled back when drafts are
    rejected. The row keeps its pages, and the next step overwrites the keys and values.
    Drafts end before the last token that the request may forward.

    A step without prompts may also let the draft head make drafts for the next step. The lengths
    know how many it has made for this one, since without them only n-grams can give drafts.
    """
    table = view.table
    may_draft = table.may_draft[rows]
    if not may_draft.any():
        return None
    computed, fitting = table.computed[rows], MAX_DRAFT_TOKENS // len(rows)
    limit = max(width for width in DRAFT_WIDTHS if width <= max(fitting, 1)) - 1
    cost = None if view.has_prompts else view.cost
    asked, made = rows[may_draft], int(table.made[rows[may_draft]].max())
    load = DecodeLoad(asked, len(rows), int(computed.sum()), limit, cost, made)
    counts = view.lengths.choose(load)
    left = table.max_total_tokens[rows] - computed
    tokens: Int32Array = np.where(may_draft, 1 + counts.forwarded, 1).astype(np.int32)
    tokens = np.minimum(tokens, left - 1)
    if not counts.made and tokens.max() <= 1:
        return None
    decode = Decode(rows, tokens, counts.made)
    return Drafts(decode, np.minimum(tokens + counts.made, left))


def shortage(
    view: View, room: Room, decode: Decode, growing: Int32Array
) -> tuple[Decode, Req | None]:
    """Give the pages that are left to the oldest requests. The newest one is preempted.

    growing: int32; those of the decoding rows that need a page.
    """
    table, shares = view.table, view.shares()
    oldest_first = sorted(growing.tolist(), key=lambda row: shares.age(table.req_at(row)))
    starved = np.array(oldest_first[room.available :], dtype=np.int32)
    decode = decode.only(~np.isin(decode.rows, starved))
    room.grow(decode.rows, decode.tokens)
    # Requests without room in another kind of memory are not in `decode`, but can be preempted.
    running = view.running(view.prefilling)
    # The step in flight frees pages when it is resolved. If it has drafts of the starved rows, and
    # rejects them, no page is missing either.
    drafted = (table.computed[starved] > table.known[starved]).all()
    waits = view.memory.pending >= len(starved) or drafted
    if waits or (len(running) == 1 and view.in_flight):
        return decode, None
    if len(running) == 1:
        raise InvariantBroken("no page is left for the only running request; this is a bug")
    victim = max(running, key=shares.age)
    return decode.only(decode.rows != victim.row), victim
