"""`RadixCache`: the prefix cache, a radix tree over pages of token ids.

The idea is RadixAttention (Zheng et al., SGLang, 2024, section 3). An edge holds whole pages of
tokens.

Eviction takes leaves that neither a request nor a step in flight uses, least recently used first.
There are three classes of leaves (NodeClass). Leaves that only an ended session has used go first.
No request has matched a new leaf since its insertion; all other leaves are reused leaves. The cache
evicts new leaves first, so that prompts that come once do not evict prefixes that many requests
share. When more than half of all evictable pages belong to reused nodes, the cache evicts reused
leaves first. This is a segmented LRU (Karedla, Love and Wherry, 1994).

With a host tier (HostTier), leaves with a copy in host memory go before new and reused ones, and
their nodes stay in the tree. A leaf on the GPU is a node without a child there.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from minisgl.core import InvariantBroken
from minisgl.core.batch import Int32Array
from minisgl.core.rows import Steps
from minisgl.kvcache.eviction import EvictionHeaps, heaps_in_order
from minisgl.kvcache.kinds import NodeParts, agreed
from minisgl.kvcache.lookup import PrefixLookup
from minisgl.kvcache.node import (
    CacheListener,
    Evicted,
    Hit,
    NodeClass,
    Place,
    RadixNode,
    pages_on_gpu,
)
from minisgl.kvcache.sessions import SessionNodes

if TYPE_CHECKING:
    from minisgl.kvcache.host import HostTier


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
    I3  Every unlocked leaf without a fence has a valid entry in `leaves`.
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
        self.kinds = kinds
        self.clock = 0
        self._num_nodes = 0
        self.leaves = EvictionHeaps()
        self.tier: HostTier | None = None
        self._sessions = SessionNodes()
        self._reused_pages = 0  # evictable pages of reused nodes
        empty: Int32Array = np.empty(0, dtype=np.int32)
        self._root = RadixNode(empty, empty, [], None, b"", last_use=0, node_id=0)
        self._lookup = PrefixLookup(self._root, page_size)
        self.evictable_pages = 0
        self.fenced_pages = 0
        self._fenced: dict[RadixNode, None] = {}  # a dict and not a set, because it keeps the order
        self._steps = steps

    def hit(self, tokens: Int32Array, salt: str = "") -> Hit:
        """Find the longest cached prefix of `tokens`, int32, that all kinds can use.

        Changes nothing.
        """
        return self._hit(*self._lookup.find(tokens, salt))

    def _hit(self, end: RadixNode, known: int) -> Hit:
        """Return the part that all kinds can use of a prefix. end, known: the result of _find."""
        on_gpu = known if self.tier is None else pages_on_gpu(end, known)
        length = loadable = agreed(on_gpu, [partial(kind.usable, end) for kind in self.kinds])
        if self.tier is not None:
            loadable = agreed(known, [partial(kind.loadable, end) for kind in self.kinds])
        node = end if length == known else self._lookup.place(end, length)[0]
        last = end if loadable == known else self._lookup.place(end, loadable)[0]
        parts = end.children or known < sum(len(each.pages) for each in end.path())
        junction = known if parts else 0
        return Hit(node, length, length * self._page_size, known, junction, loadable, last)

    def is_locked(self, node: RadixNode) -> bool:
        """A running request or a step in flight uses the node, so `evict` skips it."""
        return node.lock_count > 0 or node in self._fenced

    def match(self, tokens: Int32Array, salt: str = "", session: str = "") -> Hit:
        """Find the same prefix as `hit`, and mark its nodes as used.

        An edge is split where the prefix ends, and where the longest cached prefix ends.

        session: key of the session of the request; "": it has none.
        """
        self.clock += 1
        end, known = self._lookup.find(tokens, salt)
        hit = self._hit(end, known)
        end = self._use(end, known, session)
        last = end if hit.loadable == known else self.node_at(end, hit.loadable)
        node = last if hit.pages == hit.loadable else self.node_at(end, hit.pages)
        for kind in self.kinds:
            kind.touch(node)
        for each in node.path():
            self.mark_reused(each)
        return hit._replace(node=node, last=last)

    def insert(
        self, tokens: Int32Array, pages: Int32Array, salt: str = "", session: str = ""
    ) -> RadixNode:
        """Add the part of `tokens` that is not cached yet. Returns the last node.

        tokens: int32 [n * page_size]. pages: int32 [n], the pages with the KV of `tokens`.
        The cache owns the n pages of the prefix that ends with the node (RadixNode.prefix_pages).
        If one of them differs from the given page, the cache held the same tokens before. The
        caller then still owns the given page. The caller must put the page of the cache into its
        page table and then free the given page. The prefix ends before pages that a job loads from
        host memory: the caller still owns the pages after it.
        """
        if len(tokens) != len(pages) * self._page_size:
            raise InvariantBroken(
                f"{len(tokens)} tokens must fill {len(pages)} whole pages; this is a bug"
            )
        self.clock += 1
        end, known = self._lookup.find(tokens, salt)
        node = self._use(end, known, session)
        if self.tier is not None:
            end = self.tier.return_to_gpu(node, pages)
            if end is not node:
                node, known = end, len(pages)
        if known < len(pages):
            rest = tokens[known * self._page_size :].copy()
            key = self._lookup.key(node, rest, salt)
            leaf = self._new_node(rest, pages[known:].copy(), node, key)
            leaf.session = session
            if node.kept_as is NodeClass.ENDED:  # the session has ended while its request ran
                leaf.kept_as = node.kept_as
            else:
                self._sessions.add(leaf)
            node.children[key] = leaf
            self.evictable_pages += len(leaf.pages)
            self.offer(leaf)
            node = leaf
        if self.listeners:
            stored = node.prefix_pages()
            for listener in self.listeners:
                listener.stored(tokens[: len(stored) * self._page_size], stored, salt)
        return node

    def lock(self, end: RadixNode) -> None:
        """Forbid the eviction of the nodes from the root to `end`. Takes O(depth)."""
        for node in end.path():
            if node.place is Place.BOTH and self.tier is not None:
                self.tier.drop_copy(node)
            if node.lock_count == 0 and node.on_gpu:
                self.count(node, -len(node.pages))
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
                self.count(node, len(node.pages))
                if node.fence > self._steps.resolved:
                    self._fenced[node] = self._steps.waiting[self] = None
                    self.fenced_pages += len(node.pages)
                self.offer(node)

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
            self.offer(node)

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
        pages are evicted, or some more if they have a copy. A kind frees the pages of its parts
        itself. One older than the leaf goes first, unless the leaf has a copy.
        """
        evicted: list[Evicted] = []
        while count > 0:
            leaf = self.leaves.pop(self.eviction_order(), self.is_free)
            freed = self._evict_part(leaf)
            if leaf is not None and freed:
                self.offer(leaf)
            elif leaf is not None and leaf.place is Place.BOTH and self.tier is not None:
                evicted.append(Evicted(self.tier.evict_copied(leaf, count), leaf.fence))
                freed = len(evicted[-1].pages) + sum(kind.leave_gpu(leaf) for kind in self.kinds)
            elif leaf is not None:
                taken = min(count, len(leaf.pages))
                freed = taken + sum(kind.drop(leaf, len(leaf.pages) - taken) for kind in self.kinds)
                evicted.append(Evicted(self._cut(leaf, taken), leaf.fence))
            elif not freed:
                break
            count -= freed
        return evicted

    def eviction_order(self) -> list[int]:
        """Return the heaps from which `evict` takes leaves."""
        return heaps_in_order(reused_first=2 * self._reused_pages > self.evictable_pages)

    def _evict_part(self, leaf: RadixNode | None) -> int:
        """Let a kind free a part that was used before `leaf`. Returns the number of its pages."""
        if leaf is not None and (leaf.kept_as is NodeClass.ENDED or leaf.place is Place.BOTH):
            return 0
        before, reused = (leaf.last_use, leaf.reused) if leaf is not None else (None, True)
        return next((n for kind in self.kinds if (n := kind.evict(before, reused))), 0)

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
        node, count = self._lookup.place(end, pages)
        return node if count == len(node.pages) else self.split(node, count)

    def split(self, node: RadixNode, num_pages: int) -> RadixNode:
        """Return a new parent of `node` with its first `num_pages` pages and the same last use."""
        parent = node.parent
        cut = num_pages * self._page_size
        assert parent is not None, "the root must not be split; this is a bug"
        assert num_pages < len(node.pages), "a node must be split inside; this is a bug"
        pages = node.pages[:num_pages].copy()
        upper = self._new_node(node.tokens[:cut].copy(), pages, parent, node.key)
        upper.lock_count = node.lock_count
        upper.fence, upper.last_use = node.fence, node.last_use
        upper.kept_as, upper.session = node.kept_as, node.session
        if upper.kept_as is not NodeClass.ENDED:
            self._sessions.add(upper)
        upper.place = node.place
        if self.tier is not None:
            self.tier.split(upper, node, num_pages)
        if node in self._fenced:
            self._fenced[upper] = None
        for kind in self.kinds:
            kind.split(upper, node, num_pages)
        parent.children[upper.key] = upper
        node.tokens = node.tokens[cut:].copy()
        node.pages = node.pages[num_pages:].copy()
        node.parent = upper
        node.key = self._lookup.key(upper, node.tokens, "")
        upper.children[node.key] = node
        return upper

    def _cut(self, node: RadixNode, num_pages: int) -> Int32Array:
        """Remove the last pages of an unlocked leaf, and the leaf itself when no page is left."""
        if self.tier is not None:
            self.tier.drop_below(node)
        kept = len(node.pages) - num_pages
        taken = node.pages[kept:]
        self.count(node, -num_pages)
        for listener in self.listeners:
            listener.removed(taken)
        if kept:
            node.pages = node.pages[:kept]
            node.tokens = node.tokens[: kept * self._page_size]
            self.offer(node)
        else:
            self.remove(node)
        return taken

    def remove(self, leaf: RadixNode) -> None:
        """Take a node without children out of the tree."""
        parent = leaf.parent
        assert parent is not None, "the root must not be evicted; this is a bug"
        del parent.children[leaf.key]
        leaf.parent = None
        self._sessions.remove(leaf)
        self.offer(parent)

    def mark_reused(self, node: RadixNode) -> None:
        """Move `node` to the reused class."""
        if node.kept_as is NodeClass.ENDED:
            self._sessions.add(node)
        self._keep_as(node, NodeClass.REUSED)

    def _keep_as(self, node: RadixNode, kept_as: NodeClass) -> None:
        """Move `node` to another class."""
        if node.kept_as is kept_as:
            return
        self.leaves.withdraw(node)
        pages = 0 if node.lock_count or not node.on_gpu else len(node.pages)
        self._reused_pages -= pages * node.reused
        node.kept_as = kept_as
        self._reused_pages += pages * node.reused
        self.offer(node)

    def count(self, node: RadixNode, pages: int) -> None:
        """Count pages of a node that become evictable, or no longer are (a negative number)."""
        self.evictable_pages += pages
        self._reused_pages += pages * node.reused

    def is_free(self, node: RadixNode) -> bool:
        """The node is a leaf of its place, and can be evicted.

        A child with a copy can leave the GPU at any time. So a node behind such children is a leaf
        as well: it can be copied before they leave. Evictions take them first.
        """
        if node.lock_count or node in self._fenced or not node.parent:
            return False
        below = (child.place for child in node.children.values())
        if node.place is Place.GPU:
            return Place.GPU not in below
        if node.place is Place.BOTH:
            return all(place is Place.HOST for place in below)
        return node.place is Place.HOST and not node.children

    def offer(self, node: RadixNode) -> None:
        """Let a node be evicted, if it is free."""
        if self.is_free(node):  # `_unfence` adds a fenced one
            self.leaves.push(node)

    def _new_node(
        self, tokens: Int32Array, pages: Int32Array, parent: RadixNode, key: bytes
    ) -> RadixNode:
        self._num_nodes += 1
        parts = [kind.part(len(pages)) for kind in self.kinds]
        return RadixNode(tokens, pages, parts, parent, key, self.clock, self._num_nodes)
