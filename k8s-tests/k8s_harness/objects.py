"""Kubernetes objects as JSON, as `kubectl get -o json` prints them, and the state of a watch."""

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Object", "Seen"]

Object = dict[str, Any]


@dataclass
class Seen:
    """The state of a watch: the existing objects, and the last state of the deleted ones, by name.

    deletionTimestamp is the end of an object's grace period. The kubelet sets an earlier one at
    the end of a pod's life; `changed` keeps the first one.
    """

    objects: dict[str, Object] = field(default_factory=dict)
    gone: dict[str, Object] = field(default_factory=dict)

    def listed(self, items: list[Object]) -> None:
        names = {item["metadata"]["name"]: item for item in items}
        self.gone.update({n: o for n, o in self.objects.items() if n not in names})
        self.objects = names

    def changed(self, kind_of_change: str, item: Object) -> None:
        name = item["metadata"]["name"]
        before = self.objects.get(name, item)["metadata"]
        if "deletionTimestamp" in before:
            item["metadata"]["deletionTimestamp"] = before["deletionTimestamp"]
        if kind_of_change == "DELETED":
            self.objects.pop(name, None)
            self.gone[name] = item
        else:
            self.objects[name] = item
