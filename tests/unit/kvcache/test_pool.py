"""The contents of the KV tensors before any request writes."""

import pytest
import torch

from minisgl.kvcache.pool import KVPool, KVSpec


@pytest.mark.parametrize(("asked", "filled"), [(3, 3), (100, 8)])
def test_noise_fills_the_first_pages_and_never_the_dummy_page(asked: int, filled: int) -> None:
    spec = KVSpec(kv_heads=1, head_dim=16, dtype=torch.bfloat16)
    device = torch.device("cpu")
    pool = KVPool(spec, num_layers=2, num_pages=8, page_size=4, device=device)
    pool.fill_noise(asked)
    for layer in range(2):
        for part in pool.layer(layer):
            assert part.isfinite().all()
            assert all(len(part[page].unique()) > 16 for page in range(filled))
            assert not part[filled:].any(), "other pages, and the dummy, stay zeros"
    keys, values = pool.layer(0)
    assert not torch.equal(keys[0], values[0])
    assert not torch.equal(keys[0], keys[1])
