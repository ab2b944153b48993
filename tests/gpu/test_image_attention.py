"""Attention of images in both directions, beside FlashInfer's causal attention of the same step."""

import numpy as np
import pytest
import torch

from minisgl.attention.base import AttentionRule, AttentionStep
from minisgl.attention.registry import create_attention_backend
from minisgl.core.images import ImageSpan
from minisgl.kvcache.pool import KVPool, KVSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PAGE, PAGES, HEADS, DIM = 16, 200, 8, 256
START, LENGTHS = [700, 0, 310], [1, 600, 300]
# The second chunk begins within its image.
SPANS = (ImageSpan(1, 100, 356), ImageSpan(2, 310, 400))


def attended(device: str, dtype: torch.dtype, rule: AttentionRule) -> torch.Tensor:
    """Return the outputs of a step with a decode request and two chunks, float32 on the CPU."""
    pool = KVPool(
        KVSpec(2, DIM, dtype),
        layers=(0,),
        num_pages=PAGES,
        page_size=PAGE,
        device=torch.device(device),
    )
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(device, dtype)

    for part in pool.layer(0):
        part.copy_(random(*part.shape))
    table = torch.zeros((4, 60), dtype=torch.int32)
    for row in range(3):
        table[row] = torch.arange(60) + 60 * row
    start, lengths = (np.array(each, dtype=np.int32) for each in (START, LENGTHS))
    step = AttentionStep(
        num_decode=1,
        start=start,
        lengths=lengths,
        device_rows=torch.arange(3, dtype=torch.int32, device=device),
        device_start=torch.from_numpy(start).to(device),
        device_lengths=torch.from_numpy(lengths).to(device),
        page_table=table.to(device),
        spans=SPANS,
    )
    q = random(sum(LENGTHS), HEADS, DIM)
    out = torch.full_like(q, torch.nan)
    create_attention_backend("auto", pool, HEADS, (rule,)).prepare(step).forward(0, q, out)
    return out.float().cpu()


@pytest.mark.parametrize("window", [None, 128, 400])
@torch.inference_mode()
def test_outputs_are_those_of_the_cpu(window: int | None) -> None:
    rule = AttentionRule(window=window)
    expected = attended("cpu", torch.float32, rule)
    found = attended("cuda", torch.bfloat16, rule)
    assert (found - expected).norm() / expected.norm() < 1e-2
