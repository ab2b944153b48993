"""`plan`: chooses the requests of the next step and the number of tokens of each.

A plan is a function of the View, and changes nothing. All tensor-parallel ranks therefore plan the
same steps, and a test can compare the state before and after a plan. `apply` carries a plan out.
"""

import numpy as np

from minisgl.core import InvariantBroken
from minisgl.core.batch import DecodeLoad, Int32Array
from minisgl.core.config import DRAFT_WIDTHS, MAX_DRAFT_TOKENS
from minisgl.kvcache.memory import Room
from minisgl.scheduler.filling import Decoding, Filling
from minisgl.scheduler.view import Carry, Decode, StepPlan, View

MAX_PAUSES = 8  # steps in a row that leave decoding requests of later priorities out


def plan(view: View, may_pause: bool = True) -> StepPlan:
    """Plan the next step. may_pause: it may leave decoding requests of later priorities out.

    1. Every decoding request computes its next token, and draft tokens. When pages of full
       attention run short, the step has no drafts, the oldest requests get the free pages, and the
       newest one is preempted. When another kind of memory runs short, a request gets fewer drafts,
       or leaves the step.
    2. Admitted prompts get chunks, in order of admission, up to the budget (`step_budget`).
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

    If some clients receive no tokens, and the budget suffices, a step first ends the first prompt
    of each of them. It leaves out all other prompts, and further choices that decode if these take
    long. The next step has them. A client that receives no tokens thus waits for the step in flight
    and for one more.
    """
    memory, none = view.memory, view.decode_rows[:0]
    room = Room(memory, memory.available, [kind.room() for kind in memory.kinds], none, none)
    found = decoding(view, room)
    if found.admit and not (view.prefilling or view.waiting.uncached_tokens):  # no Python loop
        return StepPlan(found.decode, room.grown, room.counts, carry=Carry(view.carry.overtakes))
    fill = Filling(view, room, found, may_pause and view.carry.paused_steps < MAX_PAUSES)
    if not fill.take_passed():
        fewer, first_prompts = fill.of_new_clients()
        for (level, client), tokens in first_prompts.items():
            fill.take(level, client, tokens)
        if first_prompts and fill.chunks:
            return fill.plan(fewer, 1)
    for level, clients in fill.levels():
        # First an equal part for each client, then all that is left.
        for part in [fill.left // len(clients), fill.left] if len(clients) > 1 else [fill.left]:
            for client in clients:
                fill.take(level, client, part)
        fill.admits = fill.admits and not fill.waits(level)
    fill.images.finish(fill.left)
    if fill.beside is found.decode:  # no decoding row pauses
        return fill.plan(fill.beside)
    if fill.has_urgent_work() and (fill.chunks or len(fill.beside.rows)):  # a step has tokens
        return fill.plan(fill.beside, view.carry.paused_steps + 1)
    # A pause would bring no work of the first priority. All rows run, so plan again with the budget
    # beside all of them.
    return plan(view, may_pause=False)


def decoding(view: View, room: Room) -> Decoding:
    """Give the decoding rows memory for their next tokens, and for drafts."""
    rows = view.decode_rows
    # Each row first gets room for its next token in every further kind. Rows without it leave the
    # step. Drafts take the memory that is then left. Without full pages for all of them there are
    # no drafts.
    for kind in room.kinds:
        rows = rows[kind.grow(rows, np.ones(len(rows), dtype=np.int32)) > 0]
    plain = Decode(rows, np.ones(len(rows), dtype=np.int32))
    decode, ahead = with_drafts(view, plain) if view.max_drafts else (plain, plain.tokens)
    if len(room.grow(rows, ahead)):
        decode, growing = plain, room.grow(rows, plain.tokens)
        if len(growing):
            return shortage(view, room, plain, growing)
    if decode is not plain:
        for kind in room.kinds:
            decode = decode._replace(tokens=kind.grow(rows, decode.tokens))
    return Decoding(decode, None, len(rows) == len(view.decode_rows))


def with_drafts(view: View, plain: Decode) -> tuple[Decode, Int32Array]:
    """Add drafts to a step without drafts, if they pay.

    Returns the step, and the tokens of each row whose keys need pages, int32: those of the step and
    those of the new drafts.

    The engine finds and checks the drafts on the device, so the host learns one step later how many
    tokens a step gave to a request. Until then it counts all drafts as accepted: table.computed is
    an upper bound, and a request has pages up to it. Nothing is rolled back when drafts are
    rejected. The row keeps its pages, and the next step overwrites the keys and values.
    Drafts end before the last token that the request may forward.

    A step without prompts may also let the draft head make drafts for the next step. The lengths
    know how many it has made for this one, since without them only n-grams can give drafts.
    """
    table, rows = view.table, plain.rows
    may_draft = table.may_draft[rows]
    if not may_draft.any():
        return plain, plain.tokens
    computed, fitting = table.computed[rows], MAX_DRAFT_TOKENS // len(rows)
    limit = max(width for width in DRAFT_WIDTHS if width <= max(fitting, 1)) - 1
    cost = None if view.has_prompts else view.cost
    asked, made = rows[may_draft], int(table.made[rows[may_draft]].max())
    load = DecodeLoad(asked, len(rows), int(computed.sum()), limit, cost, made)
    counts = view.lengths.choose(load)
    left = table.max_total_tokens[rows] - computed
    tokens: Int32Array = np.where(may_draft, 1 + counts.forwarded, 1).astype(np.int32)
    tokens = np.minimum(tokens, left - 1)
    return Decode(rows, tokens, counts.made), np.minimum(tokens + counts.made, left)


def shortage(view: View, room: Room, decode: Decode, growing: Int32Array) -> Decoding:
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
        return Decoding(decode, None, False)
    if len(running) == 1:
        raise InvariantBroken("no page is left for the only running request; this is a bug")
    victim = max(running, key=shares.age)
    return Decoding(decode.only(decode.rows != victim.row), victim, False)
