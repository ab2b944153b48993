"""Collectives between the tensor-parallel ranks of one host.

No process-wide group is initialised: a communicator owns its process group object. Ranks find
each other through a file, and gloo and NCCL talk over loopback or shared memory, so that nothing
listens outside the host.
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import FileStore, Store

from minisgl.core import ConfigError

_LOOPBACK = "lo"


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

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks. x (contiguous) is given up by the caller and may be written in place."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[..., n] of each rank to [..., size * n], in rank order. x is not changed."""
        ...

    def agree_min(self, value: int) -> int:
        """The smallest `value` of all ranks. Blocks the host; for start-up only."""
        ...

    def close(self) -> None: ...


class SingleCommunicator:
    """One rank: nothing to exchange."""

    @property
    def tp(self) -> TPInfo:
        return TPInfo(0, 1)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def agree_min(self, value: int) -> int:
        return value

    def close(self) -> None:
        return None


class MetaCommunicator(SingleCommunicator):
    """One rank of several on the device meta: shapes as with the others, and nobody there."""

    def __init__(self, tp: TPInfo) -> None:
        self._tp = tp

    @property
    def tp(self) -> TPInfo:
        return self._tp

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self._tp.size, dim=-1)


class ProcessGroup(Protocol):
    """The part of torch's process group objects that is used (their stubs leave it out)."""

    def allreduce(self, tensors: list[Tensor], options: Any = ...) -> Any: ...

    def _allgather_base(self, output: Tensor, input: Tensor) -> Any: ...

    def shutdown(self) -> None: ...


class GroupCommunicator:
    """Several ranks over a torch process group (gloo on CPU, NCCL on CUDA)."""

    def __init__(self, tp: TPInfo, group: ProcessGroup, device: torch.device) -> None:
        self._tp = tp
        self._group = group
        self._device = device

    @property
    def tp(self) -> TPInfo:
        return self._tp

    def all_reduce(self, x: Tensor) -> Tensor:
        self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty(self._tp.size * x.numel())
        self._group._allgather_base(gathered, x.flatten()).wait()
        return gathered.view(self._tp.size, *x.shape).movedim(0, -2).flatten(-2)

    def agree_min(self, value: int) -> int:
        box = torch.tensor([value], dtype=torch.int64, device=self._device)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self._group.allreduce([box], options).wait()
        return int(box.item())

    def close(self) -> None:
        """Leave the group. Not a collective: works when other ranks are gone."""
        self._group.shutdown()


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
    group = _nccl(store, tp, timeout) if device.type == "cuda" else _gloo(store, tp, timeout)
    comm = GroupCommunicator(tp, group, device)
    comm.agree_min(0)  # connects all pairs now, so that a missing rank is noticed here
    return comm


def _gloo(store: Store, tp: TPInfo, timeout: timedelta) -> ProcessGroup:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(interface=_LOOPBACK)]
    options._timeout = timeout
    group: ProcessGroup = gloo(store, tp.rank, tp.size, options)
    return group


def _nccl(store: Store, tp: TPInfo, timeout: timedelta) -> ProcessGroup:
    # NCCL takes its bootstrap interface from the environment alone; a user's choice is kept.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", _LOOPBACK)
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    group: ProcessGroup = nccl(store, tp.rank, tp.size, options)
    return group
