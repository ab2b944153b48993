"""`FencedPool`: hands out KV pages, or rows of the request table, and takes them back."""

from collections.abc import Callable

import numpy as np

from minisgl.core import InvariantBroken
from minisgl.core.batch import Int32Array
from minisgl.core.rows import Steps


def reclaim_none(missing: int) -> None:
    """A pool whose users return their ids of their own accord."""


class FencedPool:
    """A pool of the ids 0..size-1 that delays the reuse of an id until the GPU no longer uses it.

    The GPU runs behind the host, so a step in flight may still write to a page whose request has
    ended. `release` therefore takes a fence: the last step that touches the ids. The ids are in
    quarantine until `resolve` finds that this step has completed.

        steps = Steps()
        pool = FencedPool(2, steps)
        pages = pool.allocate(2)
        pool.release(pages, fence=3)  # num_free == 0, num_quarantined == 2
        steps.resolved = 3
        pool.resolve()                # num_free == 2, num_quarantined == 0

    num_free         ids that can be allocated now.
    num_quarantined  released ids that wait for their fence.
    allocated        bool [size]; True at each allocated id.
    steps            the steps that the fences refer to.

    I1  An id that was released with fence step f is not allocated again before step f has been
        resolved.
    I2  Each id is in exactly one place: free, in quarantine, or allocated. Allocating more ids than
        are free and releasing an id twice raise InvariantBroken.
    """

    def __init__(
        self,
        size: int,
        steps: Steps,
        reclaim: Callable[[int], object] = reclaim_none,
    ) -> None:
        """reclaim: called with the number of ids that an allocation lacks; releases ids, without a
        fence in flight, if there are some."""
        self.size = size
        self.steps = steps
        self._reclaim = reclaim
        self._stack = np.arange(size - 1, -1, -1, dtype=np.int32)
        self.num_free = size
        self.allocated = np.zeros(size, dtype=np.bool_)
        self._quarantine: dict[int, list[Int32Array]] = {}
        self.num_quarantined = 0

    def allocate(self, count: int) -> Int32Array:
        """Return `count` ids, int32 [count]. The caller has checked that they are available."""
        if count > self.num_free:
            self._reclaim(count - self.num_free)
        if count > self.num_free:
            raise InvariantBroken(f"{count} ids needed, {self.num_free} free; this is a bug")
        self.num_free -= count
        ids = self._stack[self.num_free : self.num_free + count].copy()
        self.allocated[ids] = True
        return ids

    def release(self, ids: Int32Array, fence: int) -> None:
        """Take ids back. fence: the last launched step that touches them."""
        if not len(ids):
            return
        if not self.allocated[ids].all():
            raise InvariantBroken(f"ids released twice: {ids.tolist()}; this is a bug")
        self.allocated[ids] = False
        if fence <= self.steps.resolved:
            self._push(ids)
        else:
            self._quarantine.setdefault(fence, []).append(ids)
            self.num_quarantined += len(ids)
            self.steps.waiting[self] = None

    def resolve(self) -> None:
        """Free the ids whose fence is at most Steps.resolved."""
        for fence in [fence for fence in self._quarantine if fence <= self.steps.resolved]:
            for ids in self._quarantine.pop(fence):
                self.num_quarantined -= len(ids)
                self._push(ids)
        if not self._quarantine:
            self.steps.waiting.pop(self, None)

    def _push(self, ids: Int32Array) -> None:
        self._stack[self.num_free : self.num_free + len(ids)] = ids
        self.num_free += len(ids)
