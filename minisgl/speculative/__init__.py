"""Speculative decoding: drafters, acceptance, and the length of drafts. No code yet.

The seam is the batch: a decode request may forward several tokens and return several tokens
(core/batch.py). Entry points (server/worker_main.py, LLM) register this package; the core does not
import it.
"""

__all__: list[str] = []
