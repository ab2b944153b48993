"""Random keys and values, so that timed steps and tests read realistic data."""

import torch

from minisgl.kvcache.pool import KVPool


def fill_noise(pool: KVPool, num_pages: int) -> None:
    """Fill the first num_pages pages of all layers. The dummy page stays as it is."""
    for part in (part for layer in pool.layers for part in pool.layer(layer)):
        pages = part[: min(num_pages, pool.num_pages)]
        if pool.spec.fp8:  # random bytes without the two NaNs of e4m3
            pages.view(torch.uint8).random_(0, 256).bitwise_and_(0xFE)
        else:
            pages.normal_()
