"""Constrained decoding: grammars, matchers, and masks of the allowed tokens.

The entry points (launch/worker_main.py, LLM) add `processor.GrammarProcessor` to the logits
processors of engine and scheduler; the core does not import this package. A batch without
constraints skips the stage. Importing the package itself loads neither torch nor llguidance.
"""

__all__: list[str] = []
