"""Reads the status of pods and Deployments. All functions are pure functions of JSON and time."""

from datetime import datetime
from typing import NamedTuple

from k8s_harness.objects import Object

__all__ = [
    "Exit",
    "exit_of",
    "has_run",
    "is_leaving",
    "is_ready",
    "leaving",
    "mount_trouble",
    "restarts",
    "rolled_out",
    "trouble",
]

# Reasons for which a waiting container does not start, however long the wait.
FATAL_REASONS = {
    "CrashLoopBackOff",
    "ImagePullBackOff",
    "ErrImagePull",
    "ErrImageNeverPull",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
}
# From this number of restarts on a container counts as crashing, before CrashLoopBackOff is set.
CRASHES = 2
# The kubelet repeats a failed mount for this time, because the volume may still be created.
MOUNT_LIMIT_S = 20.0
# A pod may be unschedulable for a short time, until its claim is bound or an old pod has ended.
UNSCHEDULABLE_LIMIT_S = 20.0


class Exit(NamedTuple):
    """The end of a container. left_s: seconds from its end to the end of the grace period."""

    code: int
    reason: str
    left_s: float


def trouble(pod: Object, now_s: float) -> str | None:
    """Reason and message if the pod cannot become ready; None if it still may."""
    if is_leaving(pod):
        return None
    name = pod["metadata"]["name"]
    status = pod.get("status", {})
    for container in _containers(pod):
        waiting = container.get("state", {}).get("waiting", {})
        is_running = "running" in container.get("state", {})
        ended = container.get("lastState", {}).get("terminated") or {}
        ended = container.get("state", {}).get("terminated") or ended
        reason = waiting.get("reason", "")
        if ended.get("reason") == "OOMKilled":
            reason = "OOMKilled"
        elif ended and not is_running and container["restartCount"] >= CRASHES:
            reason = reason or f"ended {container['restartCount']} times"
        elif reason not in FATAL_REASONS:
            continue
        why = (ended.get("message") or "").strip() or waiting.get("message", "")
        return f"{name}/{container['name']}: {reason}: {why}"
    for condition in status.get("conditions", []):
        if condition.get("reason") == "Unschedulable":
            since_s = now_s - _time_s(condition["lastTransitionTime"])
            if since_s > UNSCHEDULABLE_LIMIT_S:
                return f"{name}: Unschedulable: {condition.get('message', '')}"
    if status.get("phase") == "Failed":
        return f"{name}: Failed: {status.get('reason', '')} {status.get('message', '')}".strip()
    return None


def mount_trouble(pod: Object, events: list[Object]) -> str | None:
    """The reason in the events if a volume of a pod that has not started cannot be mounted.

    None if the pod may still start. The status of such a pod has the reason ContainerCreating only.
    """
    waiting = [one.get("state", {}).get("waiting", {}).get("reason") for one in _containers(pod)]
    if is_leaving(pod) or not {"ContainerCreating", "PodInitializing"} & {*waiting}:
        return None
    for event in events:
        is_ours = event["involvedObject"].get("name") == pod["metadata"]["name"]
        if is_ours and event["reason"] == "FailedMount" and event.get("lastTimestamp"):
            failing_s = _time_s(event["lastTimestamp"]) - _time_s(event["firstTimestamp"])
            if failing_s > MOUNT_LIMIT_S:
                return f"{pod['metadata']['name']}: FailedMount: {event['message']}"
    return None


def is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def leaving(pods: dict[str, Object]) -> list[str]:
    """The names of the pods that are being deleted."""
    return [name for name, pod in pods.items() if is_leaving(pod)]


def is_leaving(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def restarts(pod: Object) -> int:
    return sum(container["restartCount"] for container in _containers(pod))


def has_run(pod: Object) -> bool:
    """Whether all containers were created, which needs a node and the image."""
    return all(status.get("imageID") for status in _containers(pod))


def exit_of(pod: Object, container: str) -> Exit | None:
    """The end of a container of a deleted pod, or None if the watch did not see it."""
    for status in _containers(pod):
        ended = status.get("state", {}).get("terminated")
        if status["name"] == container and ended and ended.get("finishedAt"):
            # deletionTimestamp is the end of the grace period, not its start.
            left_s = _time_s(pod["metadata"]["deletionTimestamp"]) - _time_s(ended["finishedAt"])
            return Exit(ended["exitCode"], ended.get("reason", ""), left_s)
    return None


def rolled_out(deployment: Object) -> bool:
    """Whether all pods have the current template and are available, and no old pod is left."""
    wanted = deployment["spec"]["replicas"]
    status = deployment.get("status", {})
    if status.get("observedGeneration", 0) < deployment["metadata"]["generation"]:
        return False
    counts = ("replicas", "updatedReplicas", "availableReplicas")
    return all(status.get(count, 0) == wanted for count in counts)


def _containers(pod: Object) -> list[Object]:
    status = pod.get("status", {})
    return [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]


def _time_s(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
