"""`Turns`: a queue in which clients take turns."""

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Items of several clients. A client that was served goes behind all others.

    The items of one client keep their order. A new client is served first. The clients are the
    names of keys, so their number is bounded, and a client without items keeps its place.
    """

    def __init__(self) -> None:
        self._items: dict[str, dict[T, None]] = {}

    def __bool__(self) -> bool:
        return any(self._items.values())

    def add(self, client: str, item: T) -> None:
        """Add an item, which must be hashable and in the queue only once."""
        if client not in self._items:
            self._items = {client: {}, **self._items}
        self._items[client][item] = None

    def remove(self, client: str, item: T) -> None:
        """Withdraw an item. Does nothing if it is not in the queue."""
        self._items.get(client, {}).pop(item, None)

    def take(self, allows: Callable[[str, T], bool] = lambda client, item: True) -> T | None:
        """Take out the next item that `allows` accepts. Returns None without one.

        An item passes those of its client that `allows` does not accept.
        """
        for client, items in self._items.items():
            item = next((item for item in items if allows(client, item)), None)
            if item is not None:
                del items[item]
                self._items[client] = self._items.pop(client)  # behind the other clients
                return item
        return None
