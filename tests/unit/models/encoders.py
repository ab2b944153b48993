"""The specification of a small image encoder, for tests on the CPU and on GPUs."""

from minisgl.models.encoder_spec import EncoderSpec

# Heads of 72 elements, as in published encoders.
SPEC = EncoderSpec(
    depth=3,
    hidden=288,
    inner=640,
    heads=4,
    patch=16,
    frames=2,
    merge=2,
    side=48,
    size=512,
    taps=(0, 2),
    sections=(24, 20, 20),
)
