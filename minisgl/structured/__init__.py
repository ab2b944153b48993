"""Constrained decoding: grammars, matchers, and masks of the allowed tokens. No code yet.

The seam is the stage of logits processors before the sampler (engine/logits_processing.py). A
matcher computes the token mask of each row. A batch without constraints skips the stage. Entry
points (server/worker_main.py, LLM) register this package; the core does not import it.
"""

__all__: list[str] = []
