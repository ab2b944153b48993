"""The duration of each phase of a start, and the progress of a long phase."""

import contextlib
import io
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tqdm import tqdm

logger = logging.getLogger(__name__)

# The phases of a start, in the order of the table. `processes` is the part of the total that no
# other phase counts.
PHASES = (
    "processes",
    "import",
    "download",
    "weights",
    "compile",
    "kv",
    "graphs",
    "warm_up",
)
_LOG_INTERVAL_S = 10.0  # between two lines about the progress of a phase


class Stopwatch:
    """Adds up the seconds of each phase of a start.

    compile_s: returns the seconds that this process has compiled kernels so far. A kernel compiles
    at its first launch, within another phase. Its seconds count for `compile` and not for that
    phase.
    """

    def __init__(self, compile_s: Callable[[], float] = lambda: 0.0) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._compile_s = compile_s

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the duration of the block to a phase."""
        began_s, compiled_s = time.monotonic(), self._compile_s()
        yield
        compiled_s = self._compile_s() - compiled_s
        self.seconds["compile"] += compiled_s
        self.seconds[name] += time.monotonic() - began_s - compiled_s


def whole_start(seconds: Mapping[str, float], total_s: float) -> dict[str, float]:
    """Return the seconds of all phases and of the whole start, in the order of the table."""
    found = {**dict.fromkeys(PHASES, 0.0), **seconds}
    return found | {"processes": max(total_s - sum(found.values()), 0.0), "total": total_s}


def startup_table(seconds: Mapping[str, float]) -> str:
    """Return a title, the names of the phases, and below them their seconds, in 68 columns."""
    heads = [f"{name.replace('_', '-'):>5}" for name in seconds]
    shown = [f"{s:.2f}" if s < 100 else f"{s:.0f}" for s in seconds.values()]
    row = [text.rjust(len(head)) for head, text in zip(heads, shown, strict=True)]
    return f"seconds of the start\n{' '.join(heads)}\n{' '.join(row)}"


class Progress(tqdm):  # type: ignore[misc]  # tqdm has no types
    """A tqdm bar on a terminal; elsewhere a log line every 10 s. Short work logs nothing there."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._is_terminal = sys.stderr.isatty()
        if not self._is_terminal:
            options |= {"mininterval": _LOG_INTERVAL_S, "delay": _LOG_INTERVAL_S, "miniters": 1}
            options["file"] = io.StringIO()  # tqdm writes line ends to it
        super().__init__(*arguments, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        """Show the state of the bar. tqdm calls this method at the intervals of the options."""
        if self._is_terminal:
            return super().display(msg, pos)
        if msg is None:  # tqdm clears a bar by an empty message
            state = self.format_dict | {"ncols": 0, "prefix": self.desc}
            logger.info("%s", self.format_meter(**state))
        return True


Progress.set_lock(threading.RLock())  # tqdm's own lock starts a process for semaphores
