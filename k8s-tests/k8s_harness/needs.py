"""The parts of a cluster that rendered objects need."""

from typing import Any

from k8s_harness.kube import Kube
from k8s_harness.objects import Object

__all__ = ["missing"]

DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
POD_CLASSES = ("RuntimeClass", "PriorityClass")


def missing(kube: Kube, objects: list[Object]) -> list[str]:
    """The APIs, classes, Secrets and node labels that these objects need and the cluster lacks."""
    lacks = [
        f"{o['apiVersion']} {o['kind']} is not served"
        for o in objects
        if not kube.serves(o["apiVersion"], o["kind"])
    ]
    classes = {c["metadata"]["name"]: c for c in kube.all("StorageClass")}
    for claim in (o for o in objects if o["kind"] == "PersistentVolumeClaim"):
        named = claim["spec"].get("storageClassName")
        if named and named not in classes:
            lacks.append(f"no StorageClass {named}")
        annotations = [c["metadata"].get("annotations", {}) for c in classes.values()]
        if not named and not any(a.get(DEFAULT_CLASS) == "true" for a in annotations):
            lacks.append("no default StorageClass")
    made = {o["metadata"]["name"] for o in objects if o["kind"] == "Secret"}
    labels = [node["metadata"].get("labels", {}) for node in kube.all("Node")]
    for pod in (o["spec"]["template"]["spec"] for o in objects if o["kind"] == "Deployment"):
        needed = [(kind, pod.get(f"{kind[0].lower()}{kind[1:]}Name")) for kind in POD_CLASSES]
        needed += [("Secret", name) for name in secrets_of(pod) - made]
        lacks += [f"no {kind} {name}" for kind, name in needed if name and not kube.get(kind, name)]
        wanted: dict[str, Any] = pod.get("nodeSelector", {})
        if not any(wanted.items() <= of_node.items() for of_node in labels):
            lacks.append(f"no node with {wanted}")
    return sorted({*lacks})


def secrets_of(pod: Object) -> set[str]:
    """The names of the Secrets that a pod mounts or reads variables from."""
    mounted = {volume.get("secret", {}).get("secretName") for volume in pod["volumes"]}
    variables = [entry for container in pod["containers"] for entry in container["env"]]
    sources = [entry.get("valueFrom", {}).get("secretKeyRef", {}) for entry in variables]
    return {name for name in (*mounted, *(source.get("name") for source in sources)) if name}
