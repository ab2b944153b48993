"""`apply` carries out a plan. Only this module makes the changes that a plan decides.

Messages, and the results of steps, change the rest of the View: scheduler.py sets the step cost,
results.py sets the newest resolved step and takes out requests that end, forced.py appends tokens.
They move requests by the other functions of this module.

`apply` cannot fail: a plan counts only pages that are free or that eviction frees at once, and
nothing changes between the plan and `apply`. A failed allocation is therefore InvariantBroken.
"""

from itertools import chain, islice

import numpy as np

from minisgl.core import InvariantBroken
from minisgl.core.batch import Batch, Int32Array
from minisgl.kvcache.node import Hit
from minisgl.message.messages import CopiesEnded
from minisgl.scheduler.filling import MAX_DEFERRED
from minisgl.scheduler.request import Req, ReqState
from minisgl.scheduler.view import StepPlan, View


def raise_delayed(view: View) -> None:
    """Give the longest delayed request the first priority in use, after MAX_OVERTAKES overtakes.

    It is the first admitted prompt of the later priorities, or else the oldest request in the
    queue.
    """
    delayed = view.waiting.longest_delayed(view.prefilling)
    if delayed is not None:
        view.carry = view.carry._replace(overtakes=0)
        view.waiting.raise_to(delayed, view.waiting.first_priority)
        if delayed.row >= 0:
            view.table.priority[delayed.row] = delayed.priority


def apply(view: View, plan: StepPlan) -> Batch | None:
    """Make the changes of `plan`, and return its batch; None if no request can run now.

    1. Lock all cached prefixes that the plan uses. No later eviction takes them.
    2. Give pages to the rows that decode.
    3. Begin to load prefixes from host memory.
    4. Open the rows of new requests, and stop the request to preempt. It keeps its row and pages:
       Results takes them once no step in flight contains the request.
    5. Build the batch. It advances the lengths of its rows, because the caller launches it.
    """
    memory, table, steps = view.memory, view.table, view.table.steps
    locked = _lock(view, plan) if plan.seen else {}
    if len(plan.grow):
        memory.table.append(plan.grow, plan.pages)
    for req in plan.load:
        _load(view, req, locked[req])
    for req in plan.admit:
        _admit(view, req, locked[req])
    if plan.preempt is not None:
        remove(view, plan.preempt)
    view.carry = plan.carry
    decode = plan.decode
    rows, lengths = _with_chunks(plan) if plan.chunks else (decode.rows, decode.tokens)
    if not len(rows):
        _check_progress(view, plan)
        return None
    steps.launched += 1
    updates, states = memory.table.take_updates(rows), None
    for kind in memory.kinds:
        states = kind.copies(steps.launched) or states  # one kind at most has some
        kind.grow(rows, lengths)
        updates = updates.joined(kind.updates(rows))
    num_decode = len(decode.rows)
    next_drafts = decode.next_drafts
    batch = table.build_batch(rows, lengths, num_decode, updates, states, next_drafts)
    if plan.chunks:
        _begin_to_decode(view, rows[num_decode:])
    # Requests whose last token the batch samples need no further step. Those with slow edits pause
    # when the batch is resolved.
    rows = view.decode_rows
    leaving = table.computed[rows] >= table.max_total_tokens[rows] - 1
    if table.special:
        leaving |= table.slow[rows] & (table.last_step[rows] == steps.launched)
    if np.count_nonzero(leaving):
        view.decode_rows = rows[~leaving]
    images, special = view.images, bool(table.special)
    has_images = special and table.has_images[batch.rows].any()
    if plan.encode or images.opened is not None or has_images:
        return images.complete(batch, plan.encode)
    return batch


def _with_chunks(plan: StepPlan) -> tuple[Int32Array, Int32Array]:
    """Return the rows of a step, those with chunks last, and the number of tokens of each."""
    rows = np.array([req.row for req in plan.chunks], dtype=np.int32)
    tokens = np.array([*plan.chunks.values()], dtype=np.int32)
    return np.concatenate([plan.decode.rows, rows]), np.concatenate([plan.decode.tokens, tokens])


def _check_progress(view: View, plan: StepPlan) -> None:
    """A plan without a step must wait for a result, for an edit, or for the preempted request."""
    waits = view.in_flight or view.paused or view.memory.jobs or plan.preempt is not None
    if view.waiting and not waits:
        raise InvariantBroken(
            "no request runs, but no waiting request can be admitted; this is a bug"
        )


def _begin_to_decode(view: View, rows: Int32Array) -> None:
    """Let the requests decode whose last chunk the batch contains. rows: those with chunks."""
    table = view.table
    entering = rows[table.computed[rows] >= table.prefill_end[rows]]
    for row in entering.tolist():
        req = table.req_at(row)
        view.prefilling.remove(req)
        req.state = ReqState.DECODE
    view.decode_rows = np.concatenate([view.decode_rows, entering])


def _lock(view: View, plan: StepPlan) -> dict[Req, Hit]:
    """Mark the prefixes that the plan looked up as used, in order. Lock those that it uses."""
    hits, locked = plan.admit, dict[Req, Hit]()
    for req in plan.seen:
        found = view.memory.match(req)
        if req in hits and req not in locked:
            if found.pages != hits[req].pages:
                raise InvariantBroken(
                    f"{found.pages} cached pages found, {hits[req].pages} planned; this is a bug"
                )
            view.memory.lock(found)
            locked[req] = found
        elif req in plan.load and req not in locked:
            view.memory.lock_known(found)
            locked[req] = found
    return locked


def _load(view: View, req: Req, hit: Hit) -> None:
    """Take a request out of the queue until its prefix is loaded from host memory."""
    view.waiting.remove(req)
    req.state, req.loaded = ReqState.PREPARING, True
    view.loading[req] = view.memory.load(hit)


def end_copies(view: View, message: CopiesEnded) -> None:
    """Jobs have ended on rank 0, or it can use further blocks."""
    if view.memory.tier is not None:
        view.memory.tier.open_blocks(message.num_open)
        for job in message.jobs:
            view.memory.tier.end(job)


def end_loading(view: View) -> None:
    """Enqueue the requests again whose jobs have ended, by themselves or by a flush."""
    open_jobs = view.memory.jobs
    for req in [req for req, job in view.loading.items() if job not in open_jobs]:
        del view.loading[req]
        enqueue(view, req)


def _admit(view: View, req: Req, hit: Hit) -> None:
    view.waiting.remove(req)
    view.table.open_row(req, hit.tokens)
    view.memory.open(req.row, hit)
    view.table.client[req.row] = view.waiting.clients[req.client]
    view.lengths.open(req.row)
    req.loaded = False
    if not req.admitted:
        req.admitted = True
        req.cached_tokens = hit.tokens
        req.known_tokens = hit.known_pages * view.memory.page_size
    req.state = ReqState.PREFILL
    view.prefilling.append(req)
    view.unpublished[req] = None


def rejoin(view: View, rows: Int32Array) -> None:
    """Let decoding requests compute further tokens, because a step gave them fewer than planned.

    A row leaves decode_rows while the steps in flight may sample its last token. It comes back if
    they did not, because they rejected drafts.
    """
    table = view.table
    left = table.computed[rows] < table.max_total_tokens[rows] - 1
    left &= table.rows.allocated[rows] & ~np.isin(rows, view.decode_rows) & ~table.slow[rows]
    back = [row for row in rows[left].tolist() if table.req_at(row).state is ReqState.DECODE]
    view.decode_rows = np.concatenate([view.decode_rows, np.array(back, dtype=np.int32)])


def resume(view: View, req: Req) -> None:
    """Let a paused request decode again."""
    del view.paused[req]
    view.table.slow[req.row] = req.slow
    view.decode_rows = np.concatenate([view.decode_rows, np.array([req.row], dtype=np.int32)])
    req.state = ReqState.DECODE


def recompute(view: View, req: Req) -> None:
    """Let a decoding request forward its forced tokens as a chunk of the next step.

    `req` comes before all prompts, because its client is receiving tokens.
    """
    view.decode_rows = view.decode_rows[view.decode_rows != req.row]
    view.prefilling.insert(0, req)
    req.state = ReqState.PREFILL


def remove(view: View, req: Req) -> None:
    """Take `req` out of the running requests. `req` keeps its row and pages until `release`."""
    if req.state is ReqState.PREFILL:
        view.prefilling.remove(req)
    elif req.state is ReqState.DECODE:
        view.decode_rows = view.decode_rows[view.decode_rows != req.row]
    view.unpublished.pop(req, None)
    view.paused.pop(req, None)
    view.table.running[req.row] = False
    req.state = ReqState.ENDING


def enqueue(view: View, req: Req) -> None:
    """Put a new or a preempted request into the queue."""
    req.state = ReqState.WAITING
    cached = view.memory.match(req).tokens
    others = chain(view.unpublished, islice(reversed(view.waiting), MAX_DEFERRED))
    shared, older = view.shared_with_older(req, cached, others)
    req.uncached_tokens = len(req.tokens) - (shared or cached)
    if older is not None and shared not in older.prefixes.shared:
        older.prefixes.shared.append(shared)
    view.waiting.append(req)
