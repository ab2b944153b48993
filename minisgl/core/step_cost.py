"""The predicted time of a step: a formula cheap enough to evaluate several times in each step."""

from bisect import bisect_left

import msgspec


def step_sizes(largest: int, host_bound: int = 0) -> list[int]:
    """Return the preferred sizes, in tokens, of a step with prompt tokens.

    largest: the limit. host_bound: up to this number of tokens the host launches a step for longer
    than the GPU computes it. Padding then costs no time, so only powers of four and the largest
    size remain of the sizes below.

    Matrix kernels compute whole tiles of rows. Above 256 rows a tile has 128 rows, so 448 tokens
    take as long as 512. The distance between two sizes grows with the size. On a GPU, steps of up
    to 4,096 tokens are padded to these sizes (engine/piecewise_graph.py), so a chunk should fill
    one of them.
    """
    sizes = [16, 32, *range(64, 384, 64), *range(384, 1024, 128), *range(1024, 2048, 256)]
    sizes += range(2048, largest + 1, 512)
    sizes = [size for size in sizes if size <= largest]
    kept = {16, 64, 256, 1024, 4096, *sizes[-1:]}
    return [size for size in sizes if size >= host_bound or size in kept]


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Predicts the time of one forward step, from steps that the engine timed at its start.

    tokens              numbers of tokens in a step, decode and prefill together, in rising order.
    seconds             the time of a step with each of these numbers of tokens, without attention.
                        No time is smaller than the time before it.
    per_decode_key_s    seconds for each key that a decode request attends to. The number of keys is
                        the length of its context.
    per_prefill_pair_s  seconds for each pair of query token and key of a chunk. A chunk has about
                        length * (start + length / 2) pairs. A pair costs about a fiftieth of a
                        decode key on a GPU, because all tokens of a chunk share its keys.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    per_decode_key_s: float
    per_prefill_pair_s: float

    def predict_s(self, tokens: int, decode_keys: int, prefill_pairs: int) -> float:
        """Return the predicted seconds of a step; 0.0 for 0 tokens, since no step is launched.

        The prediction is linear between two sizes, and proportional beyond the largest size.
        """
        if tokens == 0:
            return 0.0
        sizes, seconds = self.tokens, self.seconds
        right = bisect_left(sizes, tokens)
        if right == len(sizes):
            linear_s = seconds[-1] * tokens / sizes[-1]
        elif right == 0:
            linear_s = seconds[0]
        else:
            share = (tokens - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
            linear_s = seconds[right - 1] + share * (seconds[right] - seconds[right - 1])
        attention_s = self.per_decode_key_s * decode_keys + self.per_prefill_pair_s * prefill_pairs
        return linear_s + attention_s

    def __str__(self) -> str:
        """Return "KEY_NS,PAIR_NS,TOKENS:MS,...", as in the log and in `minisgl bench simulate`."""
        terms = [f"{self.per_decode_key_s * 1e9:.2f}", f"{self.per_prefill_pair_s * 1e9:.4f}"]
        sizes = zip(self.tokens, self.seconds, strict=True)
        return ",".join(terms + [f"{tokens}:{seconds * 1e3:.3f}" for tokens, seconds in sizes])
