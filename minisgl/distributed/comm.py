"""Collectives between the tensor-parallel ranks of one host.

On CPU a communicator owns its process group object. On CUDA a communicator uses torch's default
group, because symmetric memory requires that group. A process therefore has at most one
communicator on CUDA. Ranks find each other through a file. Gloo and NCCL talk over loopback or
shared memory, so no socket is reachable from outside the host.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, FileStore, Store

from minisgl.core import WorkerDied
from minisgl.distributed.peers import PeerMemory
from minisgl.kernel.dispatch import add_rms_norm, rms_norm
from minisgl.utils import log_event

logger = logging.getLogger(__name__)

_LOOPBACK = "lo"
# The ranks exchange memory addresses after all of them have joined, so a short timeout is enough.
_EXCHANGE_TIMEOUT = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class TPInfo:
    """The number of this rank, and the number of tensor-parallel ranks."""

    rank: int
    size: int


ONE_RANK = TPInfo(0, 1)


class Communicator:
    """The collectives of the layers. All ranks make the same calls in the same order.

    The methods of this class exchange no data: they are those of a single rank.
    """

    def __init__(self, tp: TPInfo = ONE_RANK) -> None:
        self.tp = tp

    def reduce_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Add up all ranks' x, plus residual if given, and return (RMSNorm of the sum, sum).

        x, residual: contiguous [T, H]; both may be overwritten. weight: [H]. The normalised tensor
        is equal on every rank and valid until the next call. The sum may be incomplete on a rank:
        use it only as the residual of the next call and in take_rows.
        """
        if residual is None:
            return rms_norm(x, weight, eps), x
        return add_rms_norm(x, residual, weight, eps)

    def take_rows(self, total: Tensor, rows: Tensor) -> Tensor:
        """Return total[rows], complete on every rank. total: a sum from reduce_norm; rows: [B]."""
        return total[rows]

    def gather(self, x: Tensor) -> Tensor:
        """Return the x of all ranks in rank order, [ranks, *].

        x: contiguous, of the same shape and dtype on every rank.
        """
        return x.unsqueeze(0)

    def agree_min(self, value: int) -> int:
        """Return the smallest `value` of all ranks. Blocks the host; for start-up only."""
        return value

    def close(self) -> None:
        """Leave the group. It is not a collective: it works after other ranks have ended."""


class SingleCommunicator(Communicator):
    """The communicator of a rank of `tp` without the other ranks. It exchanges no data."""


class GroupCommunicator(Communicator):
    """Several ranks over a torch process group: gloo on CPU, NCCL on CUDA.

    peers: memory that all ranks can read, for small sums. None: the process group does all sums.
    A collective raises WorkerDied if the process group finds that another rank has ended.
    """

    def __init__(self, tp: TPInfo, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(tp)
        self.group = group
        self.device = device
        self.peers: PeerMemory | None = None

    def share_memory(self) -> None:
        """Use peer memory for small sums from now on.

        All ranks must call it, on CUDA. If the set-up fails on a rank, that rank logs a warning and
        all ranks continue with NCCL. All ranks also continue with NCCL if their number is not a
        power of two. The ranks agree after each step, so that no rank waits for a failed rank.
        """
        tp = self.tp
        if tp.size & (tp.size - 1):
            return
        peers = PeerMemory(tp.rank, tp.size, self.device)
        for step in (peers.allocate, peers.exchange_addresses):
            works = True
            try:
                step(self.group)
            except RuntimeError as error:
                works = False
                event = "peer memory is not available, NCCL does all sums"
                log_event(logger, logging.WARNING, event, error=error)
            if not self.agree_min(int(works)):
                return
        self.peers = peers

    def reduce_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if self.peers is not None and self.peers.can_sum(x):
            return self.peers.reduce_norm(x, residual, weight, eps)
        self.all_reduce(x)
        return super().reduce_norm(x, residual, weight, eps)

    def take_rows(self, total: Tensor, rows: Tensor) -> Tensor:
        # Peer memory may complete row r of a sum on rank r % size only.
        elsewhere = rows % self.tp.size != self.tp.rank
        taken = total[rows].masked_fill_(elsewhere.unsqueeze(1), 0)
        self.all_reduce(taken)
        return taken

    def gather(self, x: Tensor) -> Tensor:
        parts = x.new_empty((self.tp.size, *x.shape))
        options: Any = AllgatherOptions()
        options.asyncOp = False
        _finish(lambda: self.group._allgather_base(parts.flatten(), x.flatten(), options))
        return parts

    def agree_min(self, value: int) -> int:
        box = torch.tensor([value], dtype=torch.int64, device=self.device)
        self.all_reduce(box, dist.ReduceOp.MIN)
        return int(box.item())

    def close(self) -> None:
        self.peers = None
        if self.device.type == "cuda":
            dist.destroy_process_group()
        else:
            self.group.shutdown()

    def all_reduce(self, x: Tensor, operation: Any = dist.ReduceOp.SUM) -> None:
        """Reduce x over all ranks in place, by the process group. x: contiguous."""
        options: Any = AllreduceOptions()
        options.reduceOp = operation
        options.asyncOp = False  # runs on the current stream, so that CUDA graphs capture it
        _finish(lambda: self.group.allreduce([x], options))


def _finish(collective: Callable[[], Any]) -> None:
    try:
        work = collective()
        if work is not None:
            work.wait()
    except RuntimeError as error:
        raise WorkerDied(f"a collective failed because another rank ended: {error}") from error


def connect(
    tp: TPInfo, device: torch.device, rendezvous_file: str, timeout_s: float = 600.0
) -> Communicator:
    """Join the other ranks. Blocks until all have joined or timeout_s seconds have passed.

    rendezvous_file: a path that all ranks share, in a private directory, not used before.
    device: the device of the tensors that the ranks exchange; gloo on CPU, NCCL on CUDA.
    """
    if tp.size == 1:
        return SingleCommunicator()
    timeout = timedelta(seconds=timeout_s)
    store = FileStore(rendezvous_file, tp.size)
    store.set_timeout(timeout)
    create_group = _nccl if device.type == "cuda" else _gloo
    comm = GroupCommunicator(tp, create_group(store, tp, device, timeout), device)
    comm.agree_min(0)  # connects all pairs of ranks, and fails here if a rank is missing
    if device.type == "cuda":
        store.set_timeout(_EXCHANGE_TIMEOUT)
        comm.share_memory()
    return comm


def _gloo(store: Store, tp: TPInfo, device: torch.device, timeout: timedelta) -> dist.ProcessGroup:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(interface=_LOOPBACK)]
    options._timeout = timeout
    group: dist.ProcessGroup = gloo(store, tp.rank, tp.size, options)
    return group


def _nccl(store: Store, tp: TPInfo, device: torch.device, timeout: timedelta) -> dist.ProcessGroup:
    # NCCL reads its bootstrap interface from the environment only. setdefault keeps a value that
    # the user has set.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", _LOOPBACK)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        store=store,
        rank=tp.rank,
        world_size=tp.size,
        timeout=timeout,
        device_id=device,
    )
    assert dist.group.WORLD is not None, "the process group must exist; this is a bug"
    return dist.group.WORLD
