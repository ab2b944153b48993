"""Objects as `kubectl get -o json` shows them, and what a watch makes of their changes."""

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Object", "Seen"]

Object = dict[str, Any]


@dataclass
class Seen:
    """What a watch has seen: the objects that are there, and the last state of those that went.

    An object keeps its first deletionTimestamp, which is the end of its grace: the kubelet sets
    another one at last.
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
