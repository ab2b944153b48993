"""The owner of what is free: KV pages, or rows of the request table. Knows ids and steps alone."""

import numpy as np

from minisgl.core import Int32Array, InvariantBroken


class FencedPool:
    """Ids 0..size-1: free ones, and such given up that a step in flight may still touch.

    num_free: can be handed out now. num_quarantined: become so when steps in flight are resolved.
    out: bool [size]; is handed out.

    I1  An id given up with fence step f is not handed out before step f has been resolved.
    I2  Each id is at any time in exactly one place: free here, in quarantine here, or handed out.
        Handing out or giving up twice raises InvariantBroken.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._stack = np.arange(size - 1, -1, -1, dtype=np.int32)
        self.num_free = size
        self.out = np.zeros(size, dtype=np.bool_)
        self._quarantine: dict[int, list[Int32Array]] = {}
        self.num_quarantined = 0
        self._resolved_step = 0

    def allocate(self, count: int) -> Int32Array:
        """Hand out `count` ids; the caller has made sure that they are there."""
        if count > self.num_free:
            raise InvariantBroken(f"{count} asked, {self.num_free} free; this is a bug")
        self.num_free -= count
        ids = self._stack[self.num_free : self.num_free + count].copy()
        self.out[ids] = True
        return ids

    def release(self, ids: Int32Array, fence: int) -> None:
        """Take ids back; `fence` is the last launched step that touches them."""
        if not len(ids):
            return
        if not self.out[ids].all():
            raise InvariantBroken(f"given up twice: {ids.tolist()}; this is a bug")
        self.out[ids] = False
        if fence <= self._resolved_step:
            self._push(ids)
        else:
            self._quarantine.setdefault(fence, []).append(ids)
            self.num_quarantined += len(ids)

    def resolve(self, step: int) -> None:
        """All steps up to and including `step` have completed on the device."""
        self._resolved_step = step
        for fence in [fence for fence in self._quarantine if fence <= step]:
            for ids in self._quarantine.pop(fence):
                self.num_quarantined -= len(ids)
                self._push(ids)

    def _push(self, ids: Int32Array) -> None:
        self._stack[self.num_free : self.num_free + len(ids)] = ids
        self.num_free += len(ids)

    def check_integrity(self) -> None:
        """Raise InvariantBroken unless every id is accounted for exactly once (I2)."""
        parked = [ids for group in self._quarantine.values() for ids in group]
        held = np.concatenate([self._stack[: self.num_free], *parked])
        if len(np.unique(held)) != len(held):
            raise InvariantBroken("an id is free twice; this is a bug")
        if self.out[held].any() or len(held) + int(self.out.sum()) != self.size:
            raise InvariantBroken(
                f"free {self.num_free} + quarantined {self.num_quarantined} + "
                f"out {int(self.out.sum())} != {self.size}; this is a bug"
            )
