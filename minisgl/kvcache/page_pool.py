"""The owner of free KV pages. Knows page ids and steps, not tensors and not requests."""

import numpy as np

from minisgl.core import Int32Array, InvariantBroken


class PagePool:
    """Free pages, and pages given up that a step in flight may still touch.

    num_free: can be handed out now. num_quarantined: become so when steps in flight are resolved.

    I1  A page given up with fence step f is not handed out before step f has been resolved.
    I2  Each page id 0..num_pages-1 is at any time in exactly one place: free here, in quarantine
        here, or handed out. Handing out or giving up twice raises InvariantBroken.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self.num_free = num_pages
        self._out = np.zeros(num_pages, dtype=np.bool_)
        self._quarantine: dict[int, list[Int32Array]] = {}
        self.num_quarantined = 0
        self._resolved_step = 0

    def allocate(self, count: int) -> Int32Array:
        """Hand out `count` pages; the caller has made sure that they are there."""
        if count > self.num_free:
            raise InvariantBroken(f"{count} pages asked, {self.num_free} free; this is a bug")
        self.num_free -= count
        pages = self._stack[self.num_free : self.num_free + count].copy()
        self._out[pages] = True
        return pages

    def release(self, pages: Int32Array, fence: int) -> None:
        """Take pages back; `fence` is the last launched step that touches them."""
        if not len(pages):
            return
        if not self._out[pages].all():
            raise InvariantBroken(f"pages given up twice: {pages.tolist()}; this is a bug")
        self._out[pages] = False
        if fence <= self._resolved_step:
            self._push(pages)
        else:
            self._quarantine.setdefault(fence, []).append(pages)
            self.num_quarantined += len(pages)

    def resolve(self, step: int) -> None:
        """All steps up to and including `step` have completed on the device."""
        self._resolved_step = step
        for fence in [fence for fence in self._quarantine if fence <= step]:
            for pages in self._quarantine.pop(fence):
                self.num_quarantined -= len(pages)
                self._push(pages)

    def _push(self, pages: Int32Array) -> None:
        self._stack[self.num_free : self.num_free + len(pages)] = pages
        self.num_free += len(pages)

    def check_integrity(self) -> None:
        """Raise InvariantBroken unless every page is accounted for exactly once (I2)."""
        parked = [pages for group in self._quarantine.values() for pages in group]
        held = np.concatenate([self._stack[: self.num_free], *parked])
        if len(np.unique(held)) != len(held):
            raise InvariantBroken("a page is free twice; this is a bug")
        if self._out[held].any() or len(held) + int(self._out.sum()) != self.num_pages:
            raise InvariantBroken(
                f"free {self.num_free} + quarantined {self.num_quarantined} + "
                f"out {int(self._out.sum())} != {self.num_pages} pages; this is a bug"
            )
