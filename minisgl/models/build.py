"""From a checkpoint folder to a model that can run."""

import torch

from minisgl.distributed import Communicator
from minisgl.layers import share_counters
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import CausalLM
from minisgl.models.loader import fill_random, load_weights, materialise
from minisgl.moe import create_moe_backend


def build_model(
    config: ModelConfig,
    folder: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    comm: Communicator,
    moe_backend: str = "auto",
    dummy_weight: bool = False,
    show_progress: bool = False,
    fill: bool = True,
) -> CausalLM:
    """Build this rank's share on the meta device, give it memory and fill it.

    dummy_weight fills it with seeded random values instead of the checkpoint's. fill=False leaves
    the parameters as they are allocated, for a device without memory. Raises ConfigError.
    """
    with torch.device("meta"):
        model = CausalLM(config, comm, create_moe_backend(moe_backend, device))
    materialise(model, device, dtype)
    share_counters(model, device)
    if fill and dummy_weight:
        fill_random(model)
    elif fill:
        load_weights(model, folder, show_progress=show_progress)
    if comm.tp.size == 1 and dtype is torch.bfloat16:  # what our products are for
        model.fold_norms()
    return model
