"""The contents of the KV tensors before any request writes."""

import torch

from minisgl.kernel.fp8 import store_kv
from minisgl.kvcache.pool import KVPool, KVSpec


def test_an_fp8_pool_reads_what_was_stored_until_the_dummy_page_is_cleared() -> None:
    spec = KVSpec(kv_heads=2, head_dim=16, dtype=torch.bfloat16, fp8=True)
    pool = KVPool(spec, layers=(0, 1, 2), num_pages=2, page_size=4, device=torch.device("cpu"))
    scales = pool.scales(1)
    assert scales is not None
    slots = torch.tensor([pool.dummy_slot, 5])
    keys, values = torch.randint(-8, 9, (2, 2, 2, 16)).bfloat16()  # e4m3 holds these numbers
    store_kv(*pool.layer(1), keys, values, slots, scales)
    found = pool.read(1, slots)
    assert found[0].dtype == torch.bfloat16
    assert torch.equal(found[0], keys)
    assert torch.equal(found[1], values)
    assert not torch.stack(pool.read(0, slots)).any()
    pool.clear_dummy()
    assert not pool.read(1, slots)[0][0].any()
    assert torch.equal(pool.read(1, slots)[1][1], values[1])
    assert (scales[pool.dummy_page] == 1).all()


def test_an_fp8_token_takes_half_the_bytes_and_two_scales_per_head() -> None:
    plain = KVSpec(kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    assert plain.token_bytes == 2 * 8 * 128 * 2
    assert plain._replace(fp8=True).token_bytes == 2 * 8 * (128 + 2)
