"""Images of requests outside the engine: settings of a family, decoding, and ids of pads."""

from minisgl.images.spec import ImageSpec, image_spec

__all__ = ["ImageSpec", "image_spec"]
