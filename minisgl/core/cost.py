"""What a step costs, as a formula small enough to ask at every step. No torch in here."""

import msgspec


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one forward step, fitted to steps that the engine timed at start.

    base_s          what a step takes with nothing in it: launches, metadata, weight reads.
    per_token_s     for each token forwarded, decode or prefill.
    per_attended_s  for each (query token, key) pair that attention reads: a decode req adds its
                    context length, a chunk about length * (start + length / 2).
    """

    base_s: float
    per_token_s: float
    per_attended_s: float

    def predict_s(self, decode_tokens: int, prefill_tokens: int, attended_tokens: int) -> float:
        """Predicted seconds of a step; 0 tokens cost nothing since no step is launched."""
        tokens = decode_tokens + prefill_tokens
        if tokens == 0:
            return 0.0
        return self.base_s + self.per_token_s * tokens + self.per_attended_s * attended_tokens
