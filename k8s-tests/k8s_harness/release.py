"""One release of the chart, in a separate namespace."""

import time
from collections.abc import Callable

from k8s_harness.helm import Helm
from k8s_harness.kube import Kube
from k8s_harness.objects import Object, Seen
from k8s_harness.status import is_leaving, is_ready, rolled_out
from k8s_harness.wait import wait_for

__all__ = ["NAME", "READY_S", "Release"]

NAME = "minisgl"  # name of the release and therefore of its objects
READY_S = 600


class Release:
    """The release `minisgl`. url: base URL for clients inside the cluster."""

    selector = f"app.kubernetes.io/name={NAME},app.kubernetes.io/instance={NAME}"

    def __init__(self, kube: Kube, helm: Helm, values: Object) -> None:
        self.kube = kube
        self.helm = helm
        self.values = values
        self.url = f"http://{NAME}.{kube.namespace}.svc:1919"

    def install(self) -> "Release":
        self.helm.install(NAME, self.values)
        return self

    def upgrade(self, values: Object) -> "Release":
        self.helm.upgrade(NAME, values)
        self.values = values
        return self

    def wait_ready(self) -> "Release":
        """Waits until all pods have the newest template, are available, and are in the Service.

        Raises Broken with the reason as soon as a pod cannot become ready.
        """

        def done(seen: Seen) -> bool:
            return NAME in seen.objects and rolled_out(seen.objects[NAME])

        wait_for(
            self.kube,
            "Deployment",
            done,
            "the rollout",
            name=NAME,
            timeout_s=READY_S,
            pods=self.selector,
        )
        wanted = self.deployment["spec"]["replicas"]
        self.wait_endpoints(lambda ready: len(ready) >= wanted)
        return self

    def wait_endpoints(self, until: Callable[[list[str]], bool]) -> list[str]:
        """Waits until `until` is true of the names of the Service's pods, and returns the names."""

        def done(seen: Seen) -> list[list[str]]:
            ready = ready_endpoints(list(seen.objects.values()))
            return [ready] if until(ready) else []

        selector = f"kubernetes.io/service-name={NAME}"
        (ready,) = wait_for(self.kube, "EndpointSlice", done, "endpoints", selector=selector)
        return ready

    @property
    def deployment(self) -> Object:
        return self.kube.need("Deployment", NAME)

    def pods(self) -> list[Object]:
        """The pods of the release that are not being deleted."""
        return [p for p in self.kube.all("Pod", self.selector) if not is_leaving(p)]

    def ready_pods(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.pods() if is_ready(pod)]

    def the_pod(self) -> str:
        """The name of the only pod."""
        (pod,) = self.pods()
        return str(pod["metadata"]["name"])

    def restart(self) -> None:
        """Restarts all pods, as `kubectl rollout restart` does."""
        stamp = {"minisgl.ai/restarted-at": f"{time.time():.3f}"}
        template = {"template": {"metadata": {"annotations": stamp}}}
        self.kube.patch("Deployment", NAME, {"spec": template})

    def scale(self, replicas: int) -> None:
        self.kube.patch("Deployment", NAME, {"spec": {"replicas": replicas}}, part="scale")


def ready_endpoints(slices: list[Object]) -> list[str]:
    """Names of the pods that receive new connections."""
    found = set()
    for one in slices:
        for endpoint in one.get("endpoints") or []:
            if endpoint.get("conditions", {}).get("ready"):
                found.add(endpoint["targetRef"]["name"])
    return sorted(found)
