"""What a step costs, as a formula small enough to ask at every step. No torch in here."""

from bisect import bisect_left

import msgspec


def step_sizes(largest: int) -> list[int]:
    """Numbers of tokens, up to `largest`, that a step with prompt tokens had better have.

    Matrix kernels take whole tiles, of 128 rows beyond 256 (448 take what 512 do); coarser where a
    step takes long. On a GPU steps of up to 4,096 tokens are padded to these
    (engine/piecewise_graph.py), so that a chunk should fill one.
    """
    sizes = [16, 32, *range(64, 384, 64), *range(384, 1024, 128), *range(1024, 2048, 256)]
    return [size for size in (*sizes, *range(2048, largest + 1, 512)) if size <= largest]


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one forward step, from steps that the engine timed at start.

    tokens            numbers of tokens, decode or prefill, rising.
    seconds           what a step of so many tokens takes without attention; never falling.
    per_decode_key_s  for each key that a decode req attends to: its context length.
    per_prefill_pair_s  for each (query token, key) pair of a chunk, about length * (start +
                      length / 2). Its keys serve all its tokens: a fiftieth of the other on a GPU.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    per_decode_key_s: float
    per_prefill_pair_s: float

    def predict_s(self, tokens: int, decode_keys: int, prefill_pairs: int) -> float:
        """Predicted seconds of a step; 0 tokens cost nothing since no step is launched.

        Straight lines between the sizes; more than the largest cost in proportion to it.
        """
        if tokens == 0:
            return 0.0
        sizes, prices = self.tokens, self.seconds
        right = bisect_left(sizes, tokens)
        if right == len(sizes):
            price = prices[-1] * tokens / sizes[-1]
        elif right == 0:
            price = prices[0]
        else:
            share = (tokens - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
            price = prices[right - 1] + share * (prices[right] - prices[right - 1])
        attention = self.per_decode_key_s * decode_keys + self.per_prefill_pair_s * prefill_pairs
        return price + attention

    def __str__(self) -> str:
        """KEY_NS,PAIR_NS,TOKENS:MS,...: as in the log, and as `minisgl bench simulate` takes it."""
        terms = [f"{self.per_decode_key_s * 1e9:.2f}", f"{self.per_prefill_pair_s * 1e9:.4f}"]
        prices = zip(self.tokens, self.seconds, strict=True)
        return ",".join(terms + [f"{tokens}:{price * 1e3:.3f}" for tokens, price in prices])
