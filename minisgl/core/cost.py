"""What a step costs, as a formula small enough to ask at every step. No torch in here."""

import msgspec


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one forward step, fitted to steps that the engine timed at start.

    base_s            what a step takes with nothing in it: launches, metadata, weight reads.
    per_token_s       for each token forwarded, decode or prefill.
    per_decode_key_s  for each key that a decode req attends to: its context length.
    per_prefill_pair_s  for each (query token, key) pair of a chunk, about length * (start +
                      length / 2). Its keys serve all its tokens: a fiftieth of the other on a GPU.
    """

    base_s: float
    per_token_s: float
    per_decode_key_s: float
    per_prefill_pair_s: float

    def predict_s(self, tokens: int, decode_keys: int, prefill_pairs: int) -> float:
        """Predicted seconds of a step; 0 tokens cost nothing since no step is launched."""
        if tokens == 0:
            return 0.0
        attention = self.per_decode_key_s * decode_keys + self.per_prefill_pair_s * prefill_pairs
        return self.base_s + self.per_token_s * tokens + attention
