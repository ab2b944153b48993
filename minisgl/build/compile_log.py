"""Logs the Triton kernels that a process compiles, so that a slow first start shows progress."""

import logging
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

_INTERVAL_S = 10.0  # the shortest time between two lines about progress


class CompileLog:
    """Counts the Triton kernels that this process compiles and logs the count.

    The first compiled kernel logs a line, then at most one line follows every 10 s, and `finish`
    logs the total. No total is known beforehand: Triton compiles a kernel at its first launch with
    new argument types. Kernels that Triton finds in a cache are not counted.

        log = CompileLog()
        log.watch()
        ...  # launch kernels
        log.finish()
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        """clock_s returns seconds that never go back."""
        self._clock_s = clock_s
        self._cache = ""
        self._kernels = 0
        self.compile_s = 0.0
        self._logged_s = 0.0
        self._finished_kernels = 0

    def watch(self) -> None:
        """Count from now on. Replaces the listener of an earlier CompileLog. Needs Triton."""
        from triton import knobs

        self._cache = str(knobs.cache.dir)
        knobs.compilation.listener = self.count

    def count(self, *, times: Any, cache_hit: bool, **rest: object) -> None:
        """Count one kernel; Triton calls this after each compilation and each cache hit.

        times.total is the duration of the compilation in microseconds. The C launcher of the kernel
        is compiled later and is not included; it takes about 0.3 s.
        """
        if cache_hit:
            return
        self._kernels += 1
        self.compile_s += times.total / 1e6
        if self._kernels == 1 or self._clock_s() - self._logged_s >= _INTERVAL_S:
            self._log("compiling Triton kernels")

    def finish(self) -> None:
        """Log the total, if any kernel was compiled since the last call. Counting goes on."""
        if self._kernels > self._finished_kernels:
            self._finished_kernels = self._kernels
            self._log("compiled Triton kernels")

    def _log(self, event: str) -> None:
        self._logged_s = self._clock_s()
        logger.info(
            "%s done=%d compile_s=%.0f cache=%s", event, self._kernels, self.compile_s, self._cache
        )
