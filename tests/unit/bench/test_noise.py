"""Noise in the pages of a KV pool."""

import pytest
import torch

from bench.noise import fill_noise
from minisgl.kvcache.pool import KVPool, KVSpec


@pytest.mark.parametrize(("asked", "filled"), [(3, 3), (100, 8)])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_noise_fills_the_first_pages_and_never_the_dummy_page(
    fp8: bool, asked: int, filled: int
) -> None:
    spec = KVSpec(kv_heads=1, head_dim=16, dtype=torch.bfloat16, fp8=fp8)
    device = torch.device("cpu")
    pool = KVPool(spec, layers=(0, 1), num_pages=8, page_size=4, device=device)
    fill_noise(pool, asked)
    for layer in range(2):
        for part in (stored.float() for stored in pool.layer(layer)):
            assert part.isfinite().all()
            assert all(len(part[page].unique()) > 16 for page in range(filled))
            assert not part[filled:].any(), "other pages, and the dummy, stay zeros"
    keys, values = (part.float() for part in pool.layer(0))
    assert not torch.equal(keys[0], values[0])
    assert not torch.equal(keys[0], keys[1])
