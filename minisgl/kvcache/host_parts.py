"""The methods of a kind of memory that the host tier calls."""

from collections.abc import Iterator

from minisgl.core.batch import Int32Array
from minisgl.kvcache.node import RadixNode


class HostParts:
    """Moves the parts of a kind in the nodes of the prefix tree to host memory and back.

    Parts that hold pages of full attention move together with their nodes, and their kind overrides
    these methods. The parts of other kinds stay on the GPU, so the methods here do nothing.
    """

    def store_pages(self, node: RadixNode) -> int:
        """Return the number of blocks that `store` gives to the part of a node."""
        return 0

    def store(self, node: RadixNode) -> None:
        """Give the part of a node blocks of host memory, if it can be copied. A job copies it."""

    def load_pages(self, end: RadixNode) -> int:
        """Return the number of pages that a load of the prefix up to `end` gives to parts."""
        return 0

    def load(self, end: RadixNode, pages: Int32Array) -> None:
        """Give the part of `end` these pages, `load_pages` of them. A job copies it."""

    def copied(self, node: RadixNode) -> Iterator[tuple[Int32Array, Int32Array]]:
        """Yield the pages and the blocks of a part that a job copies with its node."""
        yield from ()

    def end_copy(self, node: RadixNode) -> None:
        """The job has ended. A part that it has loaded needs its blocks no more."""

    def leave_gpu(self, node: RadixNode) -> int:
        """The node is in host memory only. Free the pages of its part.

        Returns the number of pages of full attention that become free.
        """
        return 0

    def drop_copy(self, node: RadixNode) -> None:
        """The node loses its copy. Free the blocks of its part, and a part that has no pages."""
