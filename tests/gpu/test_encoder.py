"""The image encoder in bfloat16 on a GPU, against float32 on the CPU."""

import pytest
import torch

from minisgl.models.encoder import ImageEncoder
from minisgl.models.encoder_spec import EncoderSpec, MergerKind
from minisgl.models.loader import materialise
from tests.unit.models.encoders import SPEC

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIGLIP = EncoderSpec(
    depth=3,
    hidden=288,
    inner=640,
    heads=4,
    patch=14,
    frames=1,
    merge=4,
    side=32,
    size=512,
    taps=(),
    sections=None,
    divisor=22.6,
    rotary=False,
    merger=MergerKind.AVERAGE,
    split_qkv=True,
    fixed=True,
    mutual=True,
)


@pytest.mark.parametrize(
    ("spec", "grids"),
    [(SPEC, [(2, 2), (24, 40), (50, 6)]), (SIGLIP, [(32, 32)])],
    ids=["qwen", "siglip"],
)
@torch.inference_mode()
def test_features_are_those_of_the_cpu(spec: EncoderSpec, grids: list[tuple[int, int]]) -> None:
    with torch.device("meta"):
        encoders = [ImageEncoder(spec) for _ in range(2)]
    materialise(encoders[0], torch.device("cpu"), torch.float32)
    materialise(encoders[1], torch.device("cuda"), torch.bfloat16)
    for ours, theirs in zip(encoders[1].parameters(), encoders[0].parameters(), strict=True):
        ours.copy_(theirs.normal_(0.0, 0.06 if theirs.dim() > 1 else 0.3))
    for rows, cols in grids:
        shape = spec.patch * rows, spec.patch * cols, 3
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8)
        expected = encoders[0].encode(pixels)
        found = encoders[1].encode(pixels.cuda())
        assert found.shape == (rows * cols // spec.merge**2, spec.width)
        parts = encoders[1].begin(pixels.cuda())
        for layer in range(spec.depth):  # as several steps encode an image
            parts = encoders[1].advance(parts, layer, layer + 1)
        assert torch.equal(encoders[1].finish(parts), found)
        error = (found.float().cpu() - expected).norm() / expected.norm()
        assert error < 2e-2
