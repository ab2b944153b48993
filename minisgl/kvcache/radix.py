"""`RadixCache`: the prefix cache, a radix tree over pages of token ids.

The idea is RadixAttention (Zheng et al., SGLang, 2024, section 3). An edge holds whole pages of
tokens. A parent finds a child by the bytes of the first page of the child's edge. The
rest of the edge is compared as arrays. In the keys of the root's children, the cache salt precedes
these bytes, so that requests with different salts share no node. All pages have the same number of
bytes, and the page is always the last part of such a key. Two different pairs of salt and page
therefore never give the same key.

Eviction takes leaves that neither a request nor a step in flight uses, least recently used first.
There are three classes of leaves (NodeClass). Leaves that only an ended session has used go first.
No request has matched a new leaf since its insertion; all other leaves are reused leaves. The cache
evicts new leaves first, so that prompts that come once do not evict prefixes that many requests
share. When more than half of all evictable pages belong to reused nodes, the cache evicts reused
leaves first. This is a segmented LRU (Karedla, Love and Wherry, 1994).
"""

from collections.abc import Sequence

import numpy as np

from minisgl.core import InvariantBroken
from minisgl.core.batch import Int32Array
from minisgl.core.rows import Steps
from minisgl.kvcache.eviction import EvictionHeaps
from minisgl.kvcache.kinds import NodeParts
from minisgl.kvcache.node import CacheListener, Evicted, Hit, NodeClass, RadixNode
from minisgl.kvcache.sessions import SessionNodes


def common_prefix(a: Int32Array, b: Int32Array) -> int:
    """Return the number of leading ids that are equal in `a` and `b`."""
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    return int(different.argmax()) if different.any() else length


class RadixCache:
    """Finds the pages with the KV of a cached prefix, so that no step computes this KV again.

    Keys are token ids in whole pages, under a salt. With page_size 2 and the requests A = 1 2 3 4
    and B = 1 2 5 6 the tree is

        root --- 1 2 (page 7) --+-- 3 4 (page 8)
                                +-- 5 6 (page 9)

        cache.insert(ids(1, 2, 3, 4), pages=ids(7, 8))    # A has been computed
        cache.match(ids(1, 2, 5, 6)).pages                # 1: B computes only 5 6

    The cache owns the pages of its nodes. A running request locks the path from the root to the end
    of its prefix. Locked nodes are not evicted. Time is a counter of operations, so that all
    tensor-parallel ranks evict the same nodes.

    clock            the number of operations so far.
    evictable_pages  pages of unlocked nodes.
    fenced_pages     those of them that a step in flight may still read. `evict` skips them, so the
                     pages that it frees can be allocated at once.

    I1  A node's lock_count is at least the lock_count of each child. Every ancestor of a locked
        node is therefore locked.
    I2  evictable_pages counts the pages of all nodes whose lock_count is 0.
    I3  Every unlocked leaf without a fence has a valid entry in _leaves.
    I4  _fenced holds the unlocked nodes whose fence has not been resolved. The unlocked ancestors
        of such a node are in it too, so all other unlocked pages can be evicted.
    I5  _sessions has exactly the nodes with a session that are not of the class ENDED.
    """

    def __init__(
        self,
        page_size: int,
        steps: Steps,
        listeners: Sequence[CacheListener] = (),
        kinds: Sequence[NodeParts] = (),
    ) -> None:
        """steps: the steps that the fences refer to. listeners: learn of each insertion and
        eviction. kinds: those beside full attention.

        A match ends where every kind can use it.
        """
        self.listeners = listeners
        self._page_size = page_size
        self._kinds = kinds
        self.clock = 0
        self._num_nodes = 0
        self._leaves = EvictionHeaps()
        self._sessions = SessionNodes()
        self._reused_pages = 0  # evictable pages of reused nodes
        empty: Int32Array = np.empty(0, dtype=np.int32)
        self._root = RadixNode(empty, empty, [], None, b"", last_use=0, node_id=0)
        self.evictable_pages = 0
        self.fenced_pages = 0
        self._fenced: dict[RadixNode, None] = {}  # a dict and not a set, because it keeps the order
        self._steps = steps

    def hit(self, tokens: Int32Array, salt: str = "") -> Hit:
        """Find the longest cached prefix of `tokens`, int32, that all kinds can use.

        Changes nothing.
        """
        return self._hit(*self._find(tokens, salt))

    def _hit(self, end: RadixNode, known: int) -> Hit:
        """Return the part that all kinds can use of a prefix. end, known: the result of _find."""
        length, before = known, -1
        while length != before:
            before = length
            for kind in self._kinds:
                length = kind.usable(end, length)
        node = end if length == known else self._place(end, length)[0]
        parts = end.children or known < sum(len(each.pages) for each in end.path())
        return Hit(node, length, length * self._page_size, known, junction=known if parts else 0)

    def is_locked(self, node: RadixNode) -> bool:
        """A running request or a step in flight uses the node, so `evict` skips it."""
        return node.lock_count > 0 or node in self._fenced

    def match(self, tokens: Int32Array, salt: str = "", session: str = "") -> Hit:
        """Find the same prefix as `hit`, and mark its nodes as used.

        An edge is split where the prefix ends, and where the longest cached prefix ends.

        session: key of the session of the request; "": it has none.
        """
        self.clock += 1
        end, known = self._find(tokens, salt)
        hit = self._hit(end, known)
        node = self._use(end, known, session)
        if hit.pages < known:
            node = self.node_at(node, hit.pages)
        for kind in self._kinds:
            kind.touch(node)
        for each in node.path():
            self.mark_reused(each)
        return hit._replace(node=node)

    def insert(
        self, tokens: Int32Array, pages: Int32Array, salt: str = "", session: str = ""
    ) -> RadixNode:
        """Add the part of `tokens` that is not cached yet. Returns the last node.

        tokens: int32 [n * page_size]. pages: int32 [n], the pages with the KV of `tokens`.
        The cache owns the n pages of the prefix that ends with the node (RadixNode.prefix_pages).
        If one of them differs from the given page, the cache held the same tokens before. The
        caller then still owns the given page. The caller must put the page of the cache into its
        page table and then free the given page.
        """
        if len(tokens) != len(pages) * self._page_size:
            raise InvariantBroken(
                f"{len(tokens)} tokens must fill {len(pages)} whole pages; this is a bug"
            )
        self.clock += 1
        end, known = self._find(tokens, salt)
        node = self._use(end, known, session)
        if known < len(pages):
            rest = tokens[known * self._page_size :].copy()
            key = self._key(node, rest, salt)
            leaf = self._new_node(rest, pages[known:].copy(), node, key)
            leaf.session = session
            if node.kept_as is NodeClass.ENDED:  # the session has ended while its request ran
                leaf.kept_as = node.kept_as
            else:
                self._sessions.add(leaf)
            node.children[key] = leaf
            self.evictable_pages += len(leaf.pages)
            self._push_if_evictable(leaf)
            node = leaf
        for listener in self.listeners:
            listener.stored(tokens, node.prefix_pages(), salt)
        return node

    def lock(self, end: RadixNode) -> None:
        """Forbid the eviction of the nodes from the root to `end`. Takes O(depth)."""
        for node in end.path():
            if node.lock_count == 0:
                self.evictable_pages -= len(node.pages)
                self._reused_pages -= len(node.pages) * node.reused
                if node in self._fenced:
                    self._unfence([node])
            node.lock_count += 1

    def unlock(self, end: RadixNode, fence: int) -> None:
        """Undo one lock. The pages may be read until step `fence` has completed.

        Raises InvariantBroken when a node is not locked.
        """
        for node in end.path():
            if node.lock_count == 0:
                raise InvariantBroken("a node is unlocked more often than locked; this is a bug")
            node.lock_count -= 1
            node.fence = max(node.fence, fence)
            if node.lock_count == 0:
                self.evictable_pages += len(node.pages)
                self._reused_pages += len(node.pages) * node.reused
                if node.fence > self._steps.resolved:
                    self._fenced[node] = self._steps.waiting[self] = None
                    self.fenced_pages += len(node.pages)
                self._push_if_evictable(node)

    def resolve(self) -> None:
        """Let `evict` take the pages whose fence is at most Steps.resolved."""
        resolved = self._steps.resolved
        self._unfence([node for node in self._fenced if node.fence <= resolved])
        if not self._fenced:
            self._steps.waiting.pop(self, None)

    def lift_fences(self) -> None:
        """Let `evict` take all unlocked pages. The caller must delay the reuse of evicted pages."""
        self._unfence([*self._fenced])

    def _unfence(self, nodes: Sequence[RadixNode]) -> None:
        for node in nodes:
            del self._fenced[node]
            self.fenced_pages -= len(node.pages)
            self._push_if_evictable(node)

    def end_session(self, session: str) -> int:
        """Let `evict` begin with the nodes that no request without this key has used.

        Returns the number of their pages. Locked nodes become evictable as before, and a request
        that matches a node keeps it again as a reused one.
        """
        nodes = self._sessions.take(session)
        for node in nodes:
            self._keep_as(node, NodeClass.ENDED)
        return sum(len(node.pages) for node in nodes)

    def evict(self, count: int) -> list[Evicted]:
        """Free `count` pages, or all that can be evicted: of leaves, and of the kinds' parts.

        Returns the pages of leaves. If a leaf has more pages than are still needed, only its last
        pages are evicted. A kind frees the pages of its parts itself. One older than the leaf goes
        first.
        """
        evicted: list[Evicted] = []
        while count > 0:
            leaf = self._leaves.pop(2 * self._reused_pages > self.evictable_pages, self._is_free)
            freed = self._evict_part(leaf)
            if leaf is not None and freed:
                self._push_if_evictable(leaf)
            elif leaf is not None:
                taken = min(count, len(leaf.pages))
                freed = taken + sum(
                    kind.drop(leaf, len(leaf.pages) - taken) for kind in self._kinds
                )
                evicted.append(Evicted(self._cut(leaf, taken), leaf.fence))
            elif not freed:
                break
            count -= freed
        return evicted

    def _evict_part(self, leaf: RadixNode | None) -> int:
        """Let a kind free a part that was used before `leaf`. Returns the number of its pages."""
        if leaf is not None and leaf.kept_as is NodeClass.ENDED:
            return 0
        before, reused = (leaf.last_use, leaf.reused) if leaf is not None else (None, True)
        return next((n for kind in self._kinds if (n := kind.evict(before, reused))), 0)

    def _find(self, tokens: Int32Array, salt: str) -> tuple[RadixNode, int]:
        """Return the node of the last page of the longest cached prefix, and its number of pages.

        The node is the root if no page is cached.
        """
        node, pages = self._root, 0
        while (position := pages * self._page_size) + self._page_size <= len(tokens):
            child = node.children.get(self._key(node, tokens[position:], salt))
            if child is None:
                break
            shared_pages = common_prefix(child.tokens, tokens[position:]) // self._page_size
            node, pages = child, pages + shared_pages
            if shared_pages < len(child.pages):
                break
        return node, pages

    def _use(self, end: RadixNode, pages: int, session: str) -> RadixNode:
        """Mark the nodes of a prefix as used by a session. Returns its last node, as node_at."""
        node = self.node_at(end, pages)
        for each in node.path():
            each.last_use = self.clock
            if each.session and each.session != session:
                self._sessions.remove(each)
                each.session = ""
                if each.kept_as is NodeClass.ENDED:
                    self._keep_as(each, NodeClass.NEW)
        return node

    def node_at(self, end: RadixNode, pages: int) -> RadixNode:
        """Return the node that ends after the first `pages` pages of the prefix that ends at `end`.

        Splits an edge if no node ends there.
        """
        node, count = self._place(end, pages)
        return node if count == len(node.pages) else self._split(node, count)

    def _place(self, end: RadixNode, pages: int) -> tuple[RadixNode, int]:
        """Return the node of the last of these pages, and the number of its pages up to there."""
        places = ((node, pages - first) for node, first in end.places() if pages > first)
        return next(places, (self._root, 0))

    def _split(self, node: RadixNode, num_pages: int) -> RadixNode:
        """Move the first `num_pages` pages of `node` to a new parent node. Returns the new node."""
        parent = node.parent
        cut = num_pages * self._page_size
        assert parent is not None, "the root must not be split; this is a bug"
        assert num_pages < len(node.pages), "a node must be split inside; this is a bug"
        pages = node.pages[:num_pages].copy()
        upper = self._new_node(node.tokens[:cut].copy(), pages, parent, node.key)
        upper.lock_count = node.lock_count
        upper.fence = node.fence
        upper.kept_as, upper.session = node.kept_as, node.session
        if upper.kept_as is not NodeClass.ENDED:
            self._sessions.add(upper)
        if node in self._fenced:
            self._fenced[upper] = None
        for kind in self._kinds:
            kind.split(upper, node, num_pages)
        parent.children[upper.key] = upper
        node.tokens = node.tokens[cut:].copy()
        node.pages = node.pages[num_pages:].copy()
        node.parent = upper
        node.key = self._key(upper, node.tokens, "")
        upper.children[node.key] = node
        return upper

    def _cut(self, node: RadixNode, num_pages: int) -> Int32Array:
        """Remove the last pages of an unlocked leaf, and the leaf itself when no page is left."""
        kept = len(node.pages) - num_pages
        taken = node.pages[kept:]
        self.evictable_pages -= num_pages
        self._reused_pages -= num_pages if node.reused else 0
        for listener in self.listeners:
            listener.removed(taken)
        if kept:
            node.pages = node.pages[:kept]
            node.tokens = node.tokens[: kept * self._page_size]
            self._push_if_evictable(node)
        else:
            parent = node.parent
            assert parent is not None, "the root must not be evicted; this is a bug"
            del parent.children[node.key]
            node.parent = None
            self._sessions.remove(node)
            self._push_if_evictable(parent)
        return taken

    def mark_reused(self, node: RadixNode) -> None:
        """Move `node` to the reused class."""
        if node.kept_as is NodeClass.ENDED:
            self._sessions.add(node)
        self._keep_as(node, NodeClass.REUSED)

    def _keep_as(self, node: RadixNode, kept_as: NodeClass) -> None:
        """Move `node` to another class."""
        if node.kept_as is kept_as:
            return
        self._leaves.withdraw(node)
        pages = 0 if node.lock_count else len(node.pages)
        self._reused_pages -= pages * node.reused
        node.kept_as = kept_as
        self._reused_pages += pages * node.reused
        self._push_if_evictable(node)

    def _is_free(self, node: RadixNode) -> bool:
        """The node is a leaf that can be evicted."""
        return not (node.lock_count or node in self._fenced or node.children or not node.parent)

    def _push_if_evictable(self, node: RadixNode) -> None:
        if self._is_free(node):  # `_unfence` adds a fenced one
            self._leaves.push(node)

    def _new_node(
        self, tokens: Int32Array, pages: Int32Array, parent: RadixNode, key: bytes
    ) -> RadixNode:
        self._num_nodes += 1
        parts = [kind.part(len(pages)) for kind in self._kinds]
        return RadixNode(tokens, pages, parts, parent, key, self.clock, self._num_nodes)

    def _key(self, parent: RadixNode, tokens: Int32Array, salt: str) -> bytes:
        page = tokens[: self._page_size].tobytes()
        return salt.encode() + page if salt and parent is self._root else page
