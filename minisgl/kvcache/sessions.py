"""`SessionNodes`: the nodes of the prefix tree that one session alone has used."""

from minisgl.kvcache.node import RadixNode


class SessionNodes:
    """The nodes that a session can give up, because no request without its key has used them.

    A session has an entry only while the cache holds such a node. The cache pages therefore bound
    the entries, whatever keys the clients send. A node leaves when its session ends, and comes back
    when a request of the session uses it. The work of an end is therefore paid by earlier requests,
    and a second end costs nothing.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, dict[RadixNode, None]] = {}  # dicts, because they keep the order

    def add(self, node: RadixNode) -> None:
        """Add a node to the entry of its session, if it has one."""
        if node.session:
            self._nodes.setdefault(node.session, {})[node] = None

    def remove(self, node: RadixNode) -> None:
        """Remove a node that is evicted, or that another request has used."""
        nodes = self._nodes.get(node.session, {})
        nodes.pop(node, None)
        if not nodes:
            self._nodes.pop(node.session, None)

    def take(self, session: str) -> list[RadixNode]:
        """Remove the entry of a session, and return its nodes."""
        return [*self._nodes.pop(session, {})]
