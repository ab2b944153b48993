"""Tensor-parallel ranks and the collectives between them."""

from minisgl.distributed.comm import (
    Communicator,
    GroupCommunicator,
    SingleCommunicator,
    TPInfo,
    connect,
)

__all__ = [
    "Communicator",
    "GroupCommunicator",
    "SingleCommunicator",
    "TPInfo",
    "connect",
]
