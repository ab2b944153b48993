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
from minisgl.scheduler.budget import prompt_tokens
from minisgl.scheduler.filling import Filling
from minisgl.scheduler.request import Req
from minisgl.scheduler.view import Carry, Decode, StepPlan, View

MAX_PAUSES = 8  # steps in a row that leave decoding requests of later priorities out


class Shortage(NamedTuple):
    """Rows find no pages. victim: the request to preempt; None if the step in flight frees some."""

    victim: Req | None


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
    decode, short = decoding(view, room)
    if short is None and not (view.prefilling or view.waiting.uncached):  # no Python loop
        return StepPlan(decode, room.grown, room.counts, carry=Carry(view.carry.overtakes))
    victim = None if short is None else short.victim
    fill = Filling(view, room, victim, divides=len(decode.rows) > 0)
    beside = fill.beside_urgent(decode) if may_pause else decode
    left = fill.resume(prompt_tokens(view, fill.prefilling, beside, fill.urgent))
    fill.limit_further(beside)
    admit = short is None
    if (passed := fill.passed_too_often) is not None:
        left -= fill.take_passed(passed, left, admit)
    elif len(view.waiting.clients) > 1:
        own = fill.of_new_clients(decode, left, admit)
        if isinstance(own, StepPlan):
            return own
        left -= own
    for level, clients in fill.levels():
        for part in [left // len(clients), left] if len(clients) > 1 else [left]:
            for client in clients:
                left -= fill.take(level, client, min(part, left), admit)
        admit = admit and not fill.waits(level, clients)
    fill.finish(left)
    pauses = beside is not decode and view.carry.paused_steps < MAX_PAUSES
    if pauses and fill.has_urgent_work():
        if not (fill.chunks or len(beside.rows)):  # a step has tokens, so price images beside all
            return plan(view, may_pause=False)
        return fill.plan(beside, view.carry.paused_steps + 1)
    return fill.plan(decode)


def decoding(view: View, room: Room) -> tuple[Decode, Shortage | None]:
    """Return the decoding rows with pages for their next tokens, and why others have none."""
    rows = view.decode_rows
    # Each row first gets room for its next token in every further kind. Rows without it leave the
    # step. Drafts take the memory that is then left. Without full pages for all of them there are
    # no drafts.
    for kind in room.kinds:
        rows = rows[kind.grow(rows, np.ones(len(rows), dtype=np.int32)) > 0]
    decode = with_drafts(view, rows) if view.max_drafts else None
    if decode is not None and not len(room.grow(rows, tokens_ahead(view, decode))):
        for kind in room.kinds:
            decode = decode._replace(tokens=kind.grow(rows, decode.tokens))
    else:
        decode = Decode(rows, np.ones(len(rows), dtype=np.int32))
        growing = room.grow(rows, decode.tokens)
        if len(growing):
            return shortage(view, room, decode, growing)
    return decode, None if len(rows) == len(view.decode_rows) else Shortage(None)


def with_drafts(view: View, rows: Int32Array) -> Decode | None:
    """Return these rows with the tokens of each in a step with drafts; None if it has none.

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
    tokens: Int32Array = np.where(may_draft, 1 + counts.forwarded, 1).astype(np.int32)
    tokens = np.minimum(tokens, table.max_total_tokens[rows] - 1 - computed)
    return Decode(rows, tokens, counts.made) if counts.made or tokens.max() > 1 else None


def tokens_ahead(view: View, decode: Decode) -> Int32Array:
    """Return the tokens of each row whose keys need pages: those of the step and the new drafts."""
    if not decode.next_drafts:
        return decode.tokens
    left = view.table.max_total_tokens[decode.rows] - view.table.computed[decode.rows]
    tokens: Int32Array = np.minimum(decode.tokens + decode.next_drafts, left)
    return tokens


def shortage(
    view: View, room: Room, decode: Decode, growing: Int32Array
) -> tuple[Decode, Shortage]:
    """Give the pages that are left to the oldest requests. The newest one is preempted.

    growing: int32; those of the decoding rows that need a page.
    """
    table, shares = view.table, view.shares()
    ages = {row: shares.age(table.req_at(row)) for row in growing.tolist()}
    oldest_first: Int32Array = np.array(sorted(ages, key=ages.__getitem__), dtype=np.int32)
    starved = oldest_first[room.available :]
    decode = decode.only(~np.isin(decode.rows, starved))
    room.grow(decode.rows, decode.tokens)
    # Requests without room in another kind of memory are not in `decode`, but can be preempted.
    running = view.running(view.prefilling)
    # The step in flight frees pages when it is resolved. If it has drafts of the starved rows, and
    # rejects them, no page is missing either.
    drafted = (table.computed[starved] > table.known[starved]).all()
    waits = view.memory.pending >= len(starved) or drafted
    if waits or (len(running) == 1 and view.in_flight):
        return decode, Shortage(None)
    if len(running) == 1:
        raise InvariantBroken("no page is left for the only running request; this is a bug")
    victim = max(running, key=shares.age)
    return decode.only(decode.rows != victim.row), Shortage(victim)
