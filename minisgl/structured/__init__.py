"""Constrained decoding: grammars, matchers, and masks of the allowed tokens. Nothing yet.

The seam is the stage of logits processors before the sampler (engine/logits_processing.py): a
matcher gives the token mask of each row, and a batch without constraints pays nothing. Entry points
(server/worker_main.py, LLM) register this package; the core does not import it.
"""

__all__: list[str] = []
