"""Waits on watches of the API server. A pod that cannot become ready ends a wait at once."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from k8s_harness.kube import Kube
from k8s_harness.objects import Seen
from k8s_harness.status import has_run, mount_trouble, trouble

__all__ = ["Broken", "NotInTime", "Recorder", "recorded", "require_startable", "wait_for"]

T = TypeVar("T")


class Broken(AssertionError):
    """The condition cannot become true, because a pod cannot become ready."""


class NotInTime(AssertionError):
    """The condition did not become true in time."""


def require_startable(kube: Kube, selector: str) -> None:
    """Raises Broken with the reason if one of these pods cannot become ready."""
    pods = kube.all("Pod", selector)
    events = [] if all(has_run(pod) for pod in pods) else kube.all("Event")
    for pod in pods:
        if why := trouble(pod, time.time()) or mount_trouble(pod, events):
            raise Broken(why)


def wait_for(
    kube: Kube,
    kind: str,
    until: Callable[[Seen], T],
    goal: str,
    *,
    selector: str = "",
    name: str = "",
    timeout_s: float = 120,
    pods: str | None = None,
) -> T:
    """Waits until `until` returns a true value, and returns that value.

    pods: selector of pods; if one of them cannot become ready, raises Broken. Raises NotInTime
    after timeout_s.
    """
    end_s = time.monotonic() + timeout_s
    checked_s = 0.0
    for seen in kube.follow(kind, selector, name):
        if value := until(seen):
            return value
        if pods is not None and time.monotonic() - checked_s > 1:
            require_startable(kube, pods)
            checked_s = time.monotonic()
        if time.monotonic() > end_s:
            break
    raise NotInTime(f"gave up waiting for {goal} in {kube.namespace} after {timeout_s:.0f} s")


class Recorder:
    """Runs a watch in a thread and keeps its state, with the last state of deleted objects."""

    def __init__(self, kube: Kube, kind: str, selector: str) -> None:
        self._news = threading.Condition()
        self._stop = threading.Event()
        self._over = False
        self._seen: Seen | None = None
        self._pool = ThreadPoolExecutor(1)
        self._work = self._pool.submit(self._watch, kube, kind, selector)

    def wait(self, until: Callable[[Seen], bool], goal: str, timeout_s: float = 120) -> Seen:
        """Waits until `until` is true of the state, and returns a copy of the state.

        Raises NotInTime, or the exception of the watch.
        """
        with self._news:

            def enough() -> bool:
                return self._over or (self._seen is not None and until(self._seen))

            came = self._news.wait_for(enough, timeout_s)
            if self._over:
                self._work.result()
            if not came or self._seen is None:
                raise NotInTime(f"gave up waiting for {goal} after {timeout_s:.0f} s")
            return Seen(dict(self._seen.objects), dict(self._seen.gone))

    def close(self) -> None:
        self._stop.set()
        self._pool.shutdown()

    def _watch(self, kube: Kube, kind: str, selector: str) -> None:
        try:
            for seen in kube.follow(kind, selector):
                with self._news:
                    self._seen = Seen(dict(seen.objects), dict(seen.gone))
                    self._news.notify_all()
                if self._stop.is_set():
                    return
        finally:
            with self._news:
                self._over = True
                self._news.notify_all()


@contextmanager
def recorded(kube: Kube, kind: str, selector: str) -> Iterator[Recorder]:
    """Yields a recorder that has listed the existing objects."""
    recorder = Recorder(kube, kind, selector)
    try:
        recorder.wait(lambda _: True, "the first listing")
        yield recorder
    finally:
        recorder.close()
