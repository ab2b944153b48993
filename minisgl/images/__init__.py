"""Images of requests outside the engine: settings of a family, decoding, and ids of pads."""

from minisgl.images.decode import DecodedImage, ImageDecoder, file_kind
from minisgl.images.pads import pad_ids
from minisgl.images.spec import ImageSpec, image_spec

__all__ = ["DecodedImage", "ImageDecoder", "ImageSpec", "file_kind", "image_spec", "pad_ids"]
