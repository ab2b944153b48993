"""The kernel of token masks equals its torch reference. TRITON_INTERPRET=1 runs it on a CPU."""

import os

import pytest
import torch

from minisgl.kernel import logits as reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device"
    ),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("width", "words", "first_id"),
    [(151_936, 4748, 0), (1511, 48, 0), (2000, 100, 1904), (64, 1, 48)],
)
def test_the_kernel_equals_the_reference(
    dtype: torch.dtype, width: int, words: int, first_id: int
) -> None:
    from minisgl.kernel.triton import token_mask as kernels

    torch.manual_seed(0)
    # Rows may have any distance, as the rows of a graph's buffer do.
    logits = torch.randn(9, width + 3, device=DEVICE).to(dtype)[:, :width]
    rows = torch.tensor([7, 0, 3, 8], dtype=torch.int32, device=DEVICE)
    mask = torch.randint(-(2**31), 2**31, (4, words), device=DEVICE).int()
    mask[1], mask[2] = 0, -1
    expected = logits.clone()
    reference.apply_token_mask(expected, rows, mask, first_id)
    kernels.apply_token_mask(logits, rows, mask, first_id)
    assert torch.equal(logits, expected)
    assert (logits[0] == -torch.inf).all()
