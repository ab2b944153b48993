"""Memory of each rank that all ranks of the host reach over NVLink, for small sums.

torch's symmetric memory allocates it and maps the others' into this process; the kernel that works
on it is minisgl.kernel.triton.reduce. No multicast.
"""

import os
from types import MappingProxyType

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import _SymmetricMemory

from minisgl.kernel.peers import BLOCKS, PeerLayout

_MOST_BYTES = 8192 * 10240  # of one sum; NCCL takes larger ones
# Of a sum, up to which one shot is as fast as two, by the number of ranks. On H200s of one host, µs
# with one and two shots, rows of 10 KiB: 4 ranks, 16: 7.7 and 8.9, 32: 9.3 and 8.8; 2 ranks, 256:
# 15.3 and 17.3, 512: 24.8 and 23.2.
_ONE_SHOT_BYTES = MappingProxyType({2: 384 * 10240, 4: 24 * 10240})
_ONE_SHOT_ELSE = 8 * 10240


class PeerMemory:
    """This rank's memory for sums, and the addresses of the other ranks' memory.

    Sums work after `allocate` and `meet`. Before, the memory has a size and no bytes.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self._rank, self._size, self._device = rank, size, device
        self.layout = PeerLayout(slot_bytes=_MOST_BYTES, row_bytes=_MOST_BYTES)
        self.memory = torch.empty(self.layout.size(size), dtype=torch.uint8, device="meta")
        self._addresses = torch.zeros(size, dtype=torch.int64, device=device)
        self._epochs = torch.zeros(BLOCKS, dtype=torch.int32, device=device)

    def allocate(self) -> None:
        """Raises RuntimeError where there is no such memory, or not enough."""
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        world = dist.group.WORLD
        assert world is not None, "the process group comes first: this is a bug"
        self.memory = _SymmetricMemory.empty_strided_p2p(
            self.memory.shape, (1,), torch.uint8, self._device, world.group_name
        )
        self.memory.zero_()
        torch.cuda.synchronize(self._device)

    def meet(self) -> None:
        """Find where each rank's memory lies in this process, once all have allocated theirs.

        A collective. Raises RuntimeError where the GPUs do not reach one another.
        """
        from torch.distributed import _symmetric_memory as symmetric

        world = dist.group.WORLD
        assert world is not None, "the process group comes first: this is a bug"
        self._handle = symmetric.rendezvous(self.memory, world)
        addresses = list(self._handle.buffer_ptrs)
        if addresses[self._rank] != self.memory.data_ptr():
            raise RuntimeError("symmetric memory is not mapped at its beginning")
        self._addresses.copy_(torch.tensor(addresses, dtype=torch.int64))

    def takes(self, x: Tensor) -> bool:
        """Whether reduce_norm can sum x; depends on shape and dtype alone. x: [T, H]."""
        rows, width = x.shape
        padded = -(-rows // self._size) * self._size
        row_bytes = width * x.element_size()
        return rows > 0 and row_bytes % 16 == 0 and padded * row_bytes <= _MOST_BYTES

    def reduce_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See minisgl.kernel.triton.reduce.reduce_norm. x: [T, H] that this takes."""
        from minisgl.kernel.triton.reduce import reduce_norm  # needs Triton

        rows = None
        limit = _ONE_SHOT_BYTES.get(self._size, _ONE_SHOT_ELSE)
        if x.numel() * x.element_size() > limit:
            begin = 2 * self.layout.slot_bytes
            rows = self.memory[begin : begin + self.layout.row_bytes].view(x.dtype)
        return reduce_norm(
            x,
            residual,
            weight,
            eps,
            peers=self._addresses,
            epochs=self._epochs,
            rank=self._rank,
            layout=self.layout,
            rows=rows,
        )
