"""`helm uninstall` deletes everything except the cache claim, whose policy is "keep"."""

from k8s_harness.kube import Kube
from k8s_harness.objects import Seen
from k8s_harness.release import NAME
from k8s_harness.values import cpu
from k8s_harness.wait import wait_for

# Kinds that controllers create and delete at any time.
TRANSIENT = {"Event", "EndpointSlice", "Endpoints", "Lease", "PodMetrics"}


def contents(kube: Kube) -> set[tuple[str, str]]:
    return {
        (kind, one["metadata"]["name"])
        for kind, one in kube.everything()
        if kind not in TRANSIENT and not one["metadata"].get("ownerReferences")
    }


def test_only_the_cache_is_left(install, image: str, namespace: Kube) -> None:
    before = contents(namespace)
    values = cpu(
        image,
        cache={"enabled": True, "size": "1Gi"},
        auth={"apiKey": "a-key-for-this-test"},
        networkPolicy={"enabled": True},
        service={"headless": True},
    )
    release = install(values).wait_ready()
    release.helm.test(NAME)
    made = contents(namespace) - before
    kinds = {kind for kind, _ in made}
    assert {"Deployment", "Service", "Secret", "ConfigMap", "NetworkPolicy"} <= kinds
    release.helm.uninstall(NAME)

    def no_pods(seen: Seen) -> bool:
        return not seen.objects

    wait_for(namespace, "Pod", no_pods, "the end of the pods")
    for kind in ("Deployment", "ReplicaSet"):
        wait_for(namespace, kind, no_pods, f"the end of every {kind}")
    assert contents(namespace) - before == {("PersistentVolumeClaim", f"{NAME}-cache")}


def test_a_later_release_can_use_the_kept_cache(install, image: str, namespace: Kube) -> None:
    """No release owns the kept claim, so the next release must name it as existingClaim."""
    values = cpu(image, cache={"enabled": True, "existingClaim": f"{NAME}-cache"})
    install(values).wait_ready()
