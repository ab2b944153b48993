"""Memory of each rank that all ranks of the host can read and write over NVLink, for small sums.

torch's symmetric memory allocates this rank's memory and maps the other ranks' memory into this
process. The kernel minisgl.kernel.triton.reduce adds up the data of all ranks. It does not use
NVLink multicast.
"""

import os
from types import MappingProxyType

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import _SymmetricMemory

from minisgl.kernel.peers import BLOCKS, PeerLayout

_MAX_BYTES = 8192 * 10240  # the largest sum over peer memory; NCCL computes larger sums
# One shot and two shots are the two algorithms of minisgl.kernel.triton.reduce. For each number of
# ranks: the largest sum, in bytes, for which one shot is not slower. Measured on H200s of one
# host with rows of 10 KiB:
#   4 ranks,  16 rows: one shot  7.7 µs, two shots  8.9 µs
#   4 ranks,  32 rows: one shot  9.3 µs, two shots  8.8 µs
#   2 ranks, 256 rows: one shot 15.3 µs, two shots 17.3 µs
#   2 ranks, 512 rows: one shot 24.8 µs, two shots 23.2 µs
_ONE_SHOT_BYTES = MappingProxyType({2: 384 * 10240, 4: 24 * 10240})
_ONE_SHOT_BYTES_OTHER = 8 * 10240  # for other numbers of ranks


class PeerMemory:
    """This rank's memory for sums, and the addresses of the other ranks' memory.

    Sums work after `allocate` and `exchange_addresses`, which take torch's default group. Before
    that, `memory` is a meta tensor without storage.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self._rank, self._size, self._device = rank, size, device
        self.layout = PeerLayout(slot_bytes=_MAX_BYTES, row_bytes=_MAX_BYTES)
        self.memory = torch.empty(self.layout.size(size), dtype=torch.uint8, device="meta")
        self._addresses = torch.zeros(size, dtype=torch.int64, device=device)
        self._epochs = torch.zeros(BLOCKS, dtype=torch.int32, device=device)

    def allocate(self, world: dist.ProcessGroup) -> None:
        """Allocate this rank's memory. Raises RuntimeError if the machine cannot provide it."""
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self.memory = _SymmetricMemory.empty_strided_p2p(
            self.memory.shape, (1,), torch.uint8, self._device, world.group_name
        )
        self.memory.zero_()
        torch.cuda.synchronize(self._device)

    def exchange_addresses(self, world: dist.ProcessGroup) -> None:
        """Find the address of each rank's memory in this process, after all ranks have allocated.

        All ranks must call it. Raises RuntimeError if the GPUs cannot access each other's memory.
        """
        from torch.distributed import _symmetric_memory as symmetric

        self._handle = symmetric.rendezvous(self.memory, world)
        addresses = list(self._handle.buffer_ptrs)
        if addresses[self._rank] != self.memory.data_ptr():
            raise RuntimeError("torch maps this rank's symmetric memory at an unexpected address")
        self._addresses.copy_(torch.tensor(addresses, dtype=torch.int64))

    def can_sum(self, x: Tensor) -> bool:
        """Whether reduce_norm can sum x [T, H].

        The answer depends only on shape and dtype, so all ranks give the same answer.
        """
        rows, width = x.shape
        padded = -(-rows // self._size) * self._size
        row_bytes = width * x.element_size()
        return rows > 0 and row_bytes % 16 == 0 and padded * row_bytes <= _MAX_BYTES

    def reduce_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return the result of minisgl.kernel.triton.reduce.reduce_norm.

        x: [T, H]; `can_sum(x)` must be true.
        """
        from minisgl.kernel.triton.reduce import reduce_norm  # needs Triton

        rows = None
        limit = _ONE_SHOT_BYTES.get(self._size, _ONE_SHOT_BYTES_OTHER)
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
