"""Creates the namespaces of the tests and deletes them with all their objects."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from k8s_harness.kube import Kube
from k8s_harness.objects import Seen
from k8s_harness.wait import wait_for

__all__ = ["Spaces"]

LABELS = {
    "pod-security.kubernetes.io/enforce": "restricted",
    "app.kubernetes.io/managed-by": "minisgl-k8s-tests",
}
GONE_S = 300


class Spaces:
    """Creates and deletes namespaces.

    live: the existing namespaces, whose objects are dumped when a test fails.
    failures: returns the number of failed tests so far.
    keep: keep a namespace if a test failed while it existed.
    """

    def __init__(self, failures: Callable[[], int], keep: bool) -> None:
        self.live: list[Kube] = []
        self._failures = failures
        self._keep = keep

    @contextmanager
    def open(self, kube: Kube, word: str) -> Iterator[Kube]:
        """Yields a new namespace that enforces the Pod Security Standard "restricted"."""
        name = f"minisgl-test-{word}-{uuid.uuid4().hex[:6]}"
        meta = {"name": name, "labels": LABELS}
        kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": meta})
        inside = kube.within(name)
        self.live.append(inside)
        failed_before = self._failures()
        try:
            yield inside
        finally:
            self.live.remove(inside)
            if not (self._keep and self._failures() > failed_before):
                remove(inside)


def remove(kube: Kube) -> None:
    """Deletes the namespace with all its objects.

    Deletes the pods first, with a grace period of 1 s. If a namespace still has pods, the namespace
    controller waits for half of their grace period before it checks the namespace again.
    """

    def is_empty(seen: Seen) -> bool:
        for name in seen.objects:
            kube.delete("Pod", name, grace_s=1)
        return not seen.objects

    def is_gone(seen: Seen) -> bool:
        return kube.namespace not in seen.objects

    for deployment in kube.all("Deployment"):
        kube.delete("Deployment", deployment["metadata"]["name"])
    wait_for(kube, "Pod", is_empty, "the end of all pods", timeout_s=GONE_S)
    kube.delete("Namespace", kube.namespace)
    wait_for(kube, "Namespace", is_gone, "its end", name=kube.namespace, timeout_s=GONE_S)
