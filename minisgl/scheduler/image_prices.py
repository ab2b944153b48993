"""`ImagePrices`: the prompt tokens that a step gives up for images."""

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple


class ImagePrices(NamedTuple):
    """Converts prices of images (ImageLimits.price) to prompt tokens of one step, and back.

    The time of an encoder adds to a step whole. The time that prompt tokens add depends on their
    number: a step that decodes reads the weights anyway, so its first tokens may take almost no
    time, and with experts they take the most. The prompt tokens that images leave are therefore the
    largest chunk that takes no longer than the rest of the time.

    budget   the prompt tokens of the step without images.
    token_s  the time of a price of 1.
    spare_s  the time that a step with this number of prompt tokens has for images. It falls when
             the number rises. None: a price is a number of prompt tokens.
    """

    budget: int
    token_s: float
    spare_s: Callable[[int], float] | None = None

    def price(self, tokens: int) -> int:
        """Return the highest price of images that take `tokens` prompt tokens of the budget.

        Beyond the budget, each further token is a price of 1.
        """
        if self.spare_s is None:
            return tokens
        left = max(self.budget - tokens, 0)
        return int(self.spare_s(left) / self.token_s) + max(tokens - self.budget, 0)

    def tokens(self, price: int) -> int:
        """Return the fewest prompt tokens that images of this price take."""
        if self.spare_s is None or not price:
            return price
        return bisect_left(range(self.budget + price), price, key=self.price)
