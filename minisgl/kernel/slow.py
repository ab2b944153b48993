"""`log_slow`: the warning about weights that no kernel multiplies."""

import logging
from functools import lru_cache

logger = logging.getLogger(__name__)


@lru_cache(maxsize=64)
def log_slow(weights: str, *values: object) -> None:
    """Warn once that no kernel multiplies these weights. weights: a format of `values`."""
    text = f"no kernel for {weights}: each call dequantises the weights"
    logger.warning(text, *values)
