"""What the status of an object says. Pure functions of recorded JSON and the time."""

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
    "restarts",
    "rolled_out",
    "trouble",
]

# A container that waits for one of these does not start by waiting longer.
HOPELESS = {
    "CrashLoopBackOff",
    "ImagePullBackOff",
    "ErrImagePull",
    "ErrImageNeverPull",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
}
# So often restarted, it is a loop, whether the kubelet calls it one already or not.
CRASHES = 2
# A pod may be unschedulable for a moment: its claim is being bound, its predecessor goes.
UNSCHEDULABLE_PATIENCE_S = 20.0


class Exit(NamedTuple):
    """The end of a container; left_s: from its end until the kubelet would have killed it."""

    code: int
    reason: str
    left_s: float


def trouble(pod: Object, now_s: float) -> str | None:
    """Why the pod will not become ready: reason and message; None while it may."""
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
        elif reason not in HOPELESS:
            continue
        why = (ended.get("message") or "").strip() or waiting.get("message", "")
        return f"{name}/{container['name']}: {reason}: {why}"
    for condition in status.get("conditions", []):
        if condition.get("reason") == "Unschedulable":
            since_s = now_s - _time_s(condition["lastTransitionTime"])
            if since_s > UNSCHEDULABLE_PATIENCE_S:
                return f"{name}: Unschedulable: {condition.get('message', '')}"
    if status.get("phase") == "Failed":
        return f"{name}: Failed: {status.get('reason', '')} {status.get('message', '')}".strip()
    return None


def is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def leaving(pods: dict[str, Object]) -> list[str]:
    """The names of those that are asked to go."""
    return [name for name, pod in pods.items() if is_leaving(pod)]


def is_leaving(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def restarts(pod: Object) -> int:
    return sum(container["restartCount"] for container in _containers(pod))


def has_run(pod: Object) -> bool:
    """Its containers have been made, so there was an image and a place for it."""
    return all(status.get("imageID") for status in _containers(pod))


def exit_of(pod: Object, container: str) -> Exit | None:
    """How a container of a deleted pod ended; None when nobody saw it."""
    for status in _containers(pod):
        ended = status.get("state", {}).get("terminated")
        if status["name"] == container and ended and ended.get("finishedAt"):
            # deletionTimestamp is when the grace period ends, not when it began.
            left_s = _time_s(pod["metadata"]["deletionTimestamp"]) - _time_s(ended["finishedAt"])
            return Exit(ended["exitCode"], ended.get("reason", ""), left_s)
    return None


def rolled_out(deployment: Object) -> bool:
    """All pods are of the current template and available, and no old one is counted."""
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
