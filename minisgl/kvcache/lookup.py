"""`PrefixLookup`: finds cached prefixes in the tree, and changes nothing."""

from minisgl.core.batch import Int32Array
from minisgl.kvcache.node import RadixNode


def common_prefix(a: Int32Array, b: Int32Array) -> int:
    """Return the number of leading ids that are equal in `a` and `b`."""
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    return int(different.argmax()) if different.any() else length


class PrefixLookup:
    """The keys of the nodes under one root, and the paths that tokens take.

    A parent finds a child by the bytes of the first page of the child's edge. The rest of the edge
    is compared as arrays. In the keys of the root's children, the cache salt precedes these bytes,
    so that requests with different salts share no node. All pages have the same number of bytes,
    and the page is always the last part of such a key. Two different pairs of salt and page
    therefore never give the same key.
    """

    def __init__(self, root: RadixNode, page_size: int) -> None:
        self._root, self._page_size = root, page_size

    def find(self, tokens: Int32Array, salt: str) -> tuple[RadixNode, int]:
        """Return the node of the last page of the longest cached prefix, and its number of pages.

        The node is the root if no page is cached.
        """
        node, pages = self._root, 0
        while (position := pages * self._page_size) + self._page_size <= len(tokens):
            child = node.children.get(self.key(node, tokens[position:], salt))
            if child is None:
                break
            shared_pages = common_prefix(child.tokens, tokens[position:]) // self._page_size
            node, pages = child, pages + shared_pages
            if shared_pages < len(child.pages):
                break
        return node, pages

    def place(self, end: RadixNode, pages: int) -> tuple[RadixNode, int]:
        """Return the node of the last of these pages, and the number of its pages up to there."""
        found = ((node, pages - first) for node, first in end.places() if pages > first)
        return next(found, (self._root, 0))

    def key(self, parent: RadixNode, tokens: Int32Array, salt: str) -> bytes:
        """Return the key of the child of `parent` whose edge begins with these tokens."""
        page = tokens[: self._page_size].tobytes()
        return salt.encode() + page if salt and parent is self._root else page
