"""The MoE backends by name, and the choice between them."""

from collections.abc import Sequence

import torch

from minisgl.core import ConfigError
from minisgl.moe.base import MoeBackend
from minisgl.moe.torch_backend import TorchMoe
from minisgl.moe.triton_backend import TritonMoe

# In the order of preference: auto takes the first backend that can run.
MOE_BACKENDS: tuple[type[MoeBackend], ...] = (TritonMoe, TorchMoe)


def create_moe_backend(
    name: str, device: torch.device, added: Sequence[type[MoeBackend]] = ()
) -> MoeBackend:
    """Make the backend called `name` on `device`. Arguments and errors: resolve_moe_backend."""
    return resolve_moe_backend(name, device, added)(device)


def resolve_moe_backend(
    name: str, device: torch.device, added: Sequence[type[MoeBackend]] = ()
) -> type[MoeBackend]:
    """Return the backend called `name`, or for auto the first that can run on `device`.

    added: backends of other packages. Raises ConfigError for an unknown name, and for a
    named backend that cannot run on `device`.
    """
    known = (*MOE_BACKENDS, *added)
    for backend in known:
        if name in ("auto", backend.name):
            obstacle = backend.obstacle(device)
            if obstacle is None:
                return backend
            if name == backend.name:
                raise ConfigError(f"MoE backend {name!r} cannot be used: {obstacle}")
    names = ", ".join(backend.name for backend in known)
    raise ConfigError(f"MoE backend {name!r} is not known; known: auto, {names}")
