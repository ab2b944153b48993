"""Numbers that several processes derive from the configuration."""

import pytest

from minisgl.core import EngineConfig
from minisgl.core.images import ImageLimits
from minisgl.settings.config import resized_tokens


@pytest.mark.parametrize("rows", [192, 8192, 12_287, 16_384])
def test_resized_image_fits_into_the_image_buffer(rows: int) -> None:
    """Regression: with 8,192 rows an image was resized to 4,096 tokens and then refused."""
    limits = ImageLimits(rows, 16, 2, 0, 1.0, 0.0, 1, 0.0)
    engine = EngineConfig(model_path=".", image_cache_tokens=rows)
    assert resized_tokens(engine) == min(limits.most_tokens, 4096)
    assert resized_tokens(engine, 100) == min(limits.most_tokens, 100)
