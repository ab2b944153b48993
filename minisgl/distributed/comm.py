"""Collectives between the tensor-parallel ranks of one host.

On CPU a communicator owns its process group object; on CUDA it is torch's default group, which
symmetric memory asks for, so that a process has one. Ranks find each other through a file, and gloo
and NCCL talk over loopback or shared memory: nothing listens outside the host.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, FileStore, Store

from minisgl.core import ConfigError, WorkerDied
from minisgl.distributed.peers import PeerMemory
from minisgl.kernel import add_rms_norm, rms_norm

logger = logging.getLogger(__name__)

_LOOPBACK = "lo"
_MEET_TIMEOUT = timedelta(seconds=30)  # for ranks that have all come to exchange addresses


@dataclass(frozen=True, slots=True)
class TPInfo:
    """This rank's place among the tensor-parallel ranks."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"tensor-parallel rank {self.rank} is not below size {self.size}")


class Communicator(Protocol):
    """What layers need of the other ranks. All ranks make the same calls in the same order."""

    @property
    def tp(self) -> TPInfo: ...

    def reduce_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """RMSNorm of the sum of all ranks' x, plus residual where there is one: (normed, sum).

        x, residual: contiguous [T, H], given up by the caller; weight: [H]. normed is the same on
        every rank and good until the next call; the sum is for the next call's residual and for
        take_rows only (a rank may have written no more than what it needs there).
        """

    def take_rows(self, total: Tensor, rows: Tensor) -> Tensor:
        """total[rows] of a sum by reduce_norm, whole on every rank. rows: integers [B]."""

    def gather(self, x: Tensor) -> Tensor:
        """The x of all ranks, contiguous and of one shape and dtype, in rank order: [ranks, *]."""

    def agree_min(self, value: int) -> int:
        """The smallest `value` of all ranks. Blocks the host; for start-up only."""

    def close(self) -> None: ...


class SingleCommunicator:
    """One rank: nothing to exchange."""

    tp = TPInfo(0, 1)

    def reduce_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return _add_norm(x, residual, weight, eps)

    def take_rows(self, total: Tensor, rows: Tensor) -> Tensor:
        return total[rows]

    def gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def agree_min(self, value: int) -> int:
        return value

    def close(self) -> None:
        return None


def _add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if residual is None:
        return rms_norm(x, weight, eps), x
    return add_rms_norm(x, residual, weight, eps)


class ProcessGroup(Protocol):
    """The part of torch's process group objects that is used (their stubs leave it out)."""

    def allreduce(self, tensors: list[Tensor], options: Any = ...) -> Any: ...

    def _allgather_base(self, output: Tensor, input: Tensor, options: Any = ...) -> Any: ...

    def shutdown(self) -> None: ...


class GroupCommunicator:
    """Several ranks over a torch process group (gloo on CPU, NCCL on CUDA).

    peers: memory that all ranks reach, for small sums without the process group; None: without.
    Raises WorkerDied where the process group finds that another rank has gone.
    """

    def __init__(self, tp: TPInfo, group: ProcessGroup, device: torch.device) -> None:
        self.tp = tp
        self.group = group
        self.device = device
        self.peers: PeerMemory | None = None

    def share_memory(self) -> None:
        """Sum over peer memory from now on; not where one rank, with a warning, cannot.

        A collective on CUDA. Ranks agree after each step: none waits for one that has failed.
        """
        tp = self.tp
        if tp.size & (tp.size - 1):
            return
        peers = PeerMemory(tp.rank, tp.size, self.device)
        for step in (peers.allocate, peers.meet):
            works = True
            try:
                step()
            except RuntimeError as error:
                works = False
                logger.warning("no peer memory, all sums go through NCCL error=%s", error)
            if not self.agree_min(int(works)):
                return
        self.peers = peers

    def reduce_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if self.peers is not None and self.peers.takes(x):
            return self.peers.reduce_norm(x, residual, weight, eps)
        self.all_reduce(x)
        return _add_norm(x, residual, weight, eps)

    def take_rows(self, total: Tensor, rows: Tensor) -> Tensor:
        elsewhere = rows % self.tp.size != self.tp.rank  # where peer memory may leave them
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
        """Leave the group. Not a collective: works when other ranks are gone."""
        self.peers = None
        if self.device.type == "cuda":
            dist.destroy_process_group()
        else:
            self.group.shutdown()

    def all_reduce(self, x: Tensor, operation: Any = dist.ReduceOp.SUM) -> None:
        """In place, by the process group. x: contiguous."""
        options: Any = AllreduceOptions()
        options.reduceOp = operation
        options.asyncOp = False  # on the current stream, so that graphs hold nothing else
        _finish(lambda: self.group.allreduce([x], options))


def _finish(collective: Callable[[], Any]) -> None:
    try:
        work = collective()
        if work is not None:
            work.wait()
    except RuntimeError as error:
        raise WorkerDied(f"a collective failed, another rank has gone: {error}") from error


def connect(
    tp: TPInfo, device: torch.device, rendezvous_file: str, timeout_s: float = 600.0
) -> Communicator:
    """Join the other ranks; blocks until all have come or timeout_s has passed.

    rendezvous_file: a path all ranks share, in a private directory, not used before. `device` is
    the one whose tensors will be exchanged; it chooses gloo or NCCL.
    """
    if tp.size == 1:
        return SingleCommunicator()
    timeout = timedelta(seconds=timeout_s)
    store = FileStore(rendezvous_file, tp.size)
    store.set_timeout(timeout)
    meet = _nccl if device.type == "cuda" else _gloo
    comm = GroupCommunicator(tp, meet(store, tp, device, timeout), device)
    comm.agree_min(0)  # connects all pairs now, so that a missing rank is noticed here
    if device.type == "cuda":
        store.set_timeout(_MEET_TIMEOUT)
        comm.share_memory()
    return comm


def _gloo(store: Store, tp: TPInfo, device: torch.device, timeout: timedelta) -> ProcessGroup:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(interface=_LOOPBACK)]
    options._timeout = timeout
    group: ProcessGroup = gloo(store, tp.rank, tp.size, options)
    return group


def _nccl(store: Store, tp: TPInfo, device: torch.device, timeout: timedelta) -> ProcessGroup:
    # NCCL takes its bootstrap interface from the environment alone; a user's choice is kept.
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
    group: ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
    return group
