"""Checks of optional features of a cluster: GPUs, metrics, load balancers, NetworkPolicies.

Each check returns None if the cluster has the feature, else a sentence that names the missing part.
"""

import time

from k8s_harness.client import script_pod, start_scripts
from k8s_harness.kube import Kube
from k8s_harness.objects import Object, Seen
from k8s_harness.wait import NotInTime, wait_for

__all__ = ["gpu", "loadbalancer", "metrics", "networkpolicy"]

GPU = "nvidia.com/gpu"
PROBE_PORT = 8080
ENFORCED_S = 15.0  # a cluster that enforces policies does so within this time
PROBE = (
    "import socket, sys\n"
    "try: socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3).close()\n"
    "except OSError: sys.exit(1)\n"
)


def gpu(kube: Kube, gpu_image: str | None) -> str | None:
    nodes = kube.all("Node")
    if not any(int(n["status"].get("allocatable", {}).get(GPU, 0)) for n in nodes):
        return f"no node offers {GPU}"
    return None if gpu_image else "--gpu-image names no image of the GPU build"


def metrics(kube: Kube) -> str | None:
    if kube.serves("metrics.k8s.io/v1beta1", "PodMetrics"):
        return None
    return "the cluster serves no metrics.k8s.io: it has no metrics-server"


def loadbalancer(kube: Kube) -> str | None:
    """Makes a Service of type LoadBalancer in a separate namespace and waits for its address."""
    spec: Object = {"type": "LoadBalancer", "ports": [{"port": 80}], "selector": {"app": "none"}}
    meta = {"name": "probe"}
    kube.create({"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec})

    def addressed(seen: Seen) -> bool:
        one = seen.objects.get("probe", {})
        return bool(one.get("status", {}).get("loadBalancer", {}).get("ingress"))

    try:
        wait_for(kube, "Service", addressed, "an address", name="probe", timeout_s=20)
    except NotInTime:
        return "a Service of type LoadBalancer gets no address"
    return None


def networkpolicy(kube: Kube, image: str) -> str | None:
    """Connects to a pod in a separate namespace, before and after a policy that forbids it."""
    serve = ["-m", "http.server", str(PROBE_PORT), "--directory", "/scripts"]
    start_scripts(
        kube,
        script_pod("target", image, serve, PROBE_PORT),
        script_pod("caller", image, ["-c", "import signal; signal.pause()"]),
    )
    address = kube.need("Pod", "target")["status"]["podIP"]
    call = ("python3", "-c", PROBE, address, str(PROBE_PORT))
    assert kube.execute("caller", *call)[0] == 0, (
        "the pods cannot connect to each other even without a policy"
    )
    spec = {"podSelector": {"matchLabels": {"app": "target"}}, "policyTypes": ["Ingress"]}
    policy = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "spec": spec}
    kube.create({**policy, "metadata": {"name": "deny"}})
    end_s = time.monotonic() + ENFORCED_S
    for _ in kube.follow("NetworkPolicy", name="deny"):
        if kube.execute("caller", *call)[0] != 0:
            return None
        if time.monotonic() > end_s:
            break
    return "the cluster enforces no NetworkPolicy: a connection succeeded that a policy forbids"
