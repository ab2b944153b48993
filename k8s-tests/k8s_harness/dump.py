"""Writes events, objects and logs of a failed test's namespace to files, without secrets."""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from k8s_harness.kube import Kube
from k8s_harness.objects import Object

__all__ = ["dump_namespace", "secrets_of", "without_secrets"]

HIDDEN = "(hidden)"
MIN_SECRET_CHARS = 6  # a shorter secret occurs in too many other words to be replaced
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW", re.IGNORECASE)
# Long fields that do not help to explain a failure.
_NOISE = ("managedFields", "kubectl.kubernetes.io/last-applied-configuration")


def dump_namespace(kube: Kube, folder: Path) -> None:
    """Writes objects.yaml, events.txt and a NAME.CONTAINER[.previous].log for each container."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden = secrets_of(kube.all("Secret"))
    objects = [o for kind, o in kube.everything() if kind not in ("Secret", "Event")]
    shown = yaml.safe_dump_all((without_secrets(o) for o in objects), sort_keys=False)
    texts = {"objects.yaml": shown, "events.txt": event_lines(kube.all("Event"))}
    for pod in kube.all("Pod"):
        texts |= dict(logs_of(kube, pod))
    for name, text in texts.items():
        for secret in hidden:
            text = text.replace(secret, HIDDEN)
        (folder / name).write_text(text)


def logs_of(kube: Kube, pod: Object) -> Iterator[tuple[str, str]]:
    name = pod["metadata"]["name"]
    for container in pod["spec"].get("initContainers", []) + pod["spec"]["containers"]:
        for previous in (False, True):
            text = kube.logs(name, container["name"], previous)
            if text is not None:
                ending = ".previous.log" if previous else ".log"
                yield f"{name}.{container['name']}{ending}", text


def event_lines(events: list[Object]) -> str:
    """One line for each event, the oldest first."""

    def when(event: Object) -> str:
        times = (event.get("lastTimestamp"), event.get("eventTime"), event.get("firstTimestamp"))
        return next((t for t in times if t), "")

    def line(event: Object) -> str:
        about = event["involvedObject"]
        head = f"{event.get('type')} {about['kind']}/{about.get('name')} {event.get('reason')}"
        said = (event.get("message") or "").strip()
        return f"{when(event)} {head} x{event.get('count') or 1}: {said}\n"

    return "".join(map(line, sorted(events, key=when)))


def secrets_of(secrets: list[Object]) -> list[str]:
    """All values of the Secrets, plain and in base64, the longest first."""
    values = set()
    for secret in secrets:
        for value in (secret.get("data") or {}).values():
            text = base64.b64decode(value).decode(errors="replace").strip()
            values |= {text, value} if len(text) >= MIN_SECRET_CHARS else set()
    return sorted(values, key=len, reverse=True)


def without_secrets(thing: Object) -> Object:
    """A copy without long fields and without the values of variables that may be secret."""
    return json.loads(json.dumps(thing), object_hook=_cleaned)  # type: ignore[no-any-return]


def _cleaned(part: Object) -> Object:
    kept = {key: value for key, value in part.items() if key not in _NOISE}
    if "value" in kept and _SECRET_NAME.search(str(kept.get("name", ""))):
        kept["value"] = HIDDEN
    return kept
