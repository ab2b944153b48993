"""The MoE backends by name, and the choice between them."""

from collections.abc import Sequence

import torch

from minisgl.core.config import select_backend
from minisgl.moe.base import MoeBackend
from minisgl.moe.torch_backend import TorchMoe
from minisgl.moe.triton_backend import TritonMoe

# In the order of preference: auto takes the first backend that can run.
MOE_BACKENDS: tuple[type[MoeBackend], ...] = (TritonMoe, TorchMoe)


def resolve_moe_backend(
    name: str, device: torch.device, added: Sequence[type[MoeBackend]] = ()
) -> type[MoeBackend]:
    """Return the backend called `name`, or for auto the first that can run on `device`.

    added: backends of other packages. Raises ConfigError for an unknown name, and for a
    named backend that cannot run on `device`.
    """
    known = {backend.name: backend for backend in (*MOE_BACKENDS, *added)}
    return select_backend("MoE", name, known, lambda one: one.obstacle(device))
