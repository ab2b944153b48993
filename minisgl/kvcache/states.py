"""`States`: the kind of memory of layers with a recurrent state."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minisgl.core.batch import EngineLike, Int32Array, StateCopies
from minisgl.core.rows import Prefixes, Rows
from minisgl.kvcache.kinds import CacheKind, KindRoom, NewKind, Wanted
from minisgl.kvcache.node import Hit, RadixNode
from minisgl.kvcache.snapshots import Snapshot, Snapshots

if TYPE_CHECKING:
    from minisgl.kvcache.memory import Memory

MIN_NEW_TOKENS = 512  # the end of a prompt or an answer is saved if it has this many new tokens
MIN_BRANCH_TOKENS = 64  # the same where requests branch off


def state_kinds(engine: EngineLike) -> tuple[NewKind, ...]:
    """Return the kind of layers with a recurrent state, if the model has such layers."""
    return (States,) if engine.snapshot_pages else ()


@dataclass(slots=True)
class Saving:
    """Where the state of a row is to be saved.

    request      number of the request.
    prompt       number of tokens of the prompt.
    done         tokens of the newest snapshot of this request, or of the one that it began with.
    junction     tokens after which other cached tokens follow than those of the row; 0: none.
    prefixes     as in Rows.
    node, pages  the published part of the row.
    """

    request: int
    prompt: int
    done: int
    junction: int
    prefixes: Prefixes
    node: RadixNode | None = None
    pages: int = 0


class States(CacheKind):
    """Saves the states of rows, and loads them for other requests.

    Each row has a state on the device. It holds whole pages of tokens, at most those of the row
    (EngineLike). A snapshot is a copy of it in pages of the KV pool. A node of the tree can own a
    snapshot, which is valid for the end of the node. A hit ends at such a node.

    Snapshots are taken where requests diverge: at the end of the stable prompt, at the end of an
    answer or at a preemption, at the end of the first message, where a match knows more pages than
    it can use and branches off (a junction), and where a waiting request shares a prefix with the
    row. A chunk that ends in the page after such a place leaves the state there.

    I1  A batch saves a state before the next step of its row, and before the next owner of the row
        begins: the first batch after the state has reached the place.
    """

    name = "states"

    def __init__(self, engine: EngineLike, rows: Rows, memory: "Memory", index: int) -> None:
        """index: of the part in RadixNode.parts."""
        self._rows, self._memory, self._page_size = rows, memory, engine.page_size
        self.totals = {"saved": 0, "loaded": 0, "evicted": 0}
        num_pages, steps = engine.snapshot_pages, rows.steps
        self.parts = self.snapshots = Snapshots(memory, num_pages, index, steps, self.totals)
        self.most_pins = num_pages
        self._savings: dict[int, Saving] = {}
        self._requests = 0
        # By row: tokens of the state that the newest launched step leaves, and that is to be saved.
        self._due: dict[int, int] = {}
        # The copies of the next batch.
        self._saves: list[tuple[int, Snapshot]] = []
        self._loads: dict[int, Snapshot] = {}

    # --- for the plan: pure -------------------------------------------------------------------

    def room(self) -> "StateRoom":
        """Return the counters of one plan."""
        return StateRoom(self)

    def usage(self) -> tuple[int, int, int]:
        """The numbers of pages of the snapshots of requests, and of those in the cache."""
        snapshots, pages = self.snapshots, self.snapshots.num_pages
        return len(snapshots.own) * pages, snapshots.num_cached * pages, 0

    def evictable(self) -> tuple[int, int]:
        """The pages of snapshots that no batch copies, and those of the others."""
        own, cached, _ = self.usage()
        fenced = len(self.snapshots.fenced) * self.snapshots.num_pages
        return own + cached - fenced, fenced

    def of_row(self, row: int) -> tuple[Saving, int]:
        """Return where the state of a row is to be saved, and the end of its chunks."""
        return self._savings[row], int(self._rows.prefill_end[row])

    def new_saving(self, prompt: int, hit: int, junction: int, prefixes: Prefixes) -> Saving:
        """Return where the state of a new row is to be saved. hit, junction: pages, as in Hit."""
        size = self._page_size
        return Saving(self._requests, prompt, hit * size, junction * size, prefixes)

    def places(self, saving: Saving) -> dict[int, bool]:
        """Return the tokens at which a state is to be saved, and whether requests branch off."""
        if not self._memory.caches:
            return {}
        stable, first, shared = saving.prefixes
        price = self.snapshots.num_pages * self._page_size
        branches = [saving.junction, first if first >= price else 0, *shared]
        reach, done = self._floor(saving.prompt - 1), saving.done
        least = done + MIN_BRANCH_TOKENS
        places = {at: True for at in map(self._floor, branches) if least <= at <= reach}
        end = min(self._floor(stable) or reach, reach)
        if end - max([done, *(at for at in places if at <= end)]) >= MIN_NEW_TOKENS:
            places[end] = False
        return places

    def chunk_end(self, saving: Saving, start: int, end: int, last: int) -> int:
        """Return the largest allowed end of a chunk from `start`, up to `end`; `start`: none.

        last: the end of the prompt, or of the forced tokens.
        """
        if inside := start % self._page_size:
            end = min(end, start - inside + self._page_size)
        else:
            places = [at for at in self.places(saving) if at >= start]
            end = min([end, *(at + self._page_size for at in places)])
        return end if end == last else max(self._floor(end), start)

    def _floor(self, tokens: int) -> int:
        return tokens - tokens % self._page_size

    # --- for apply, and the end of a step: writing ----------------------------------------------

    def lock(self, hit: Hit) -> None:
        """Protect the snapshot at the end of a prefix until a batch has loaded it."""
        if (snapshot := self.snapshots.at(hit.node)) is not None:
            self.snapshots.lock(snapshot)

    def open(self, row: int, hit: Hit) -> None:
        """Let a row begin with the snapshot at the end of its cached prefix."""
        prompt, prefixes = int(self._rows.known[row]), self._rows.prefixes[row]
        self._requests += 1
        saving = self.new_saving(prompt, hit.pages, hit.junction, prefixes)
        self._savings[row] = saving
        self._rows.state_at[row] = saving.done
        if (snapshot := self.snapshots.at(hit.node)) is not None:
            self._loads[row] = snapshot

    def copies(self, step: int) -> StateCopies | None:
        """Return the copies of the batch with this number. It is launched next."""
        for row, tokens in self._due.items():
            self._save(row, tokens)
        self._due.clear()
        saves = [(row, snapshot) for row, snapshot in self._saves if not snapshot.freed]
        loads = [*self._loads.items()]
        for _, snapshot in (*saves, *loads):
            self.snapshots.record_copy(snapshot, step)
        for _, snapshot in loads:
            self.snapshots.unlock(snapshot)
        self.totals["saved"] += len(saves)
        self.totals["loaded"] += len(loads)
        self._saves.clear()
        self._loads.clear()
        if not saves and not loads:
            return None
        return StateCopies(*self._listed(saves), *self._listed(loads))

    def _listed(self, copies: list[tuple[int, Snapshot]]) -> tuple[Int32Array, Int32Array]:
        rows: Int32Array = np.array([row for row, _ in copies], dtype=np.int32)
        pages: Int32Array = np.array([snapshot.pages for _, snapshot in copies], dtype=np.int32)
        return rows, pages.reshape(-1, self.snapshots.num_pages)

    def grow(self, rows: Int32Array, tokens: Int32Array) -> None:
        """Record the states that a step leaves. It is launched next."""
        start = self._rows.computed[rows]
        chunks = start < self._rows.prefill_end[rows]
        self._rows.state_at[rows] = np.where(chunks, start + tokens - 1, start)
        for row in rows[chunks].tolist():
            at = self._floor(int(self._rows.state_at[row]))
            if at in self.places(self._savings[row]):
                self._due[row] = at

    def publish(self, row: int, node: RadixNode, pages: int) -> None:
        """Give the snapshots of a row to the tree."""
        saving = self._savings[row]
        saving.node, saving.pages = node, pages
        if row in self._due:
            self._save(row, self._due.pop(row))
        for snapshot in self.snapshots.own_of(saving.request):
            if snapshot.tokens <= pages * self._page_size:
                self.snapshots.attach(snapshot, node)

    def close(self, row: int) -> None:
        """Save the state of a row for the next request, if its tokens are published."""
        saving, at = self._savings[row], self._floor(int(self._rows.state_at[row]))
        if (loaded := self._loads.pop(row, None)) is not None:
            self.snapshots.unlock(loaded)
        self._due.pop(row, None)
        for snapshot in self.snapshots.own_of(saving.request):
            self.snapshots.release(snapshot)
        if saving.node is not None and at <= saving.pages * self._page_size:
            above = self.snapshots.above(saving.node)
            last = next((each for each in above if each.tokens <= at), None)
            if last is not None:
                self.snapshots.refresh(last)  # the next turn may leave the answer out
            if at - (0 if last is None else last.tokens) >= MIN_NEW_TOKENS:
                self._save(row, at)
                # With few new tokens in the prompt, `last` is the snapshot of an earlier request.
                before = None if last is None or last.request == saving.request else last
                for snapshot in self.snapshots.own_of(saving.request):
                    self.snapshots.attach(snapshot, saving.node, before)
        del self._savings[row]

    def _save(self, row: int, tokens: int) -> None:
        """Let the next batch save the state of a row, if pages are left for it."""
        saving = self._savings[row]
        branches = self.places(saving).get(tokens, False)
        if (snapshot := self.snapshots.take(tokens, saving.request, branches)) is not None:
            self._saves.append((row, snapshot))
            saving.done = tokens


class StateRoom(KindRoom):
    """Each row has a state. The plan counts the snapshots that it loads."""

    def __init__(self, states: States) -> None:
        self._states, self._snapshots = states, states.snapshots
        self._new: dict[int, Saving] = {}  # by the number of a new row
        self._used: set[Snapshot] = set()

    def pins(self, hit: Hit) -> int:
        """The pages of the snapshot at the end of a hit, if evictions could take them before."""
        snapshot = self._snapshots.at(hit.node)
        counted = snapshot is None or snapshot in self._used or snapshot in self._snapshots.fenced
        return 0 if counted else self._snapshots.num_pages

    def open(self, row: int, wanted: Wanted, hit: Hit) -> None:
        """Count a new row."""
        if (snapshot := self._snapshots.at(hit.node)) is not None:
            self._used.add(snapshot)
        prompt, prefixes = len(wanted.tokens), wanted.prefixes
        self._new[row] = self._states.new_saving(prompt, hit.pages, hit.junction, prefixes)

    def cut(self, row: int, start: int, tokens: int) -> int:
        """End a chunk at the end of a page or of the prompt, and where a state is to be saved."""
        new = self._new.get(row)
        saving, last = (new, new.prompt) if new else self._states.of_row(row)
        return self._states.chunk_end(saving, start, start + tokens, last) - start
