"""The image encoder in bfloat16 on a GPU, against float32 on the CPU."""

import pytest
import torch

from minisgl.models.encoder import ImageEncoder
from minisgl.models.encoder_spec import EncoderSpec
from minisgl.models.loader import materialise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# Heads of 72 elements, as in published encoders.
SPEC = EncoderSpec(3, 288, 640, 4, 16, 2, 2, 48, 512, (0, 2), (24, 20, 20))


@torch.inference_mode()
def test_features_are_those_of_the_cpu() -> None:
    with torch.device("meta"):
        encoders = [ImageEncoder(SPEC) for _ in range(2)]
    materialise(encoders[0], torch.device("cpu"), torch.float32)
    materialise(encoders[1], torch.device("cuda"), torch.bfloat16)
    for ours, theirs in zip(encoders[1].parameters(), encoders[0].parameters(), strict=True):
        ours.copy_(theirs.normal_(0.0, 0.06 if theirs.dim() > 1 else 0.3))
    for rows, cols in ((2, 2), (24, 40), (50, 6)):
        pixels = torch.randint(0, 256, (16 * rows, 16 * cols, 3), dtype=torch.uint8)
        expected = encoders[0].encode(pixels)
        found = encoders[1].encode(pixels.cuda())
        assert found.shape == (rows * cols // 4, SPEC.width)
        parts = encoders[1].begin(pixels.cuda())
        for layer in range(SPEC.depth):  # as several steps encode an image
            parts = encoders[1].advance(parts, layer, layer + 1)
        assert torch.equal(encoders[1].finish(parts), found)
        error = (found.float().cpu() - expected).norm() / expected.norm()
        assert error < 2e-2
