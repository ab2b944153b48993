"""Speculative decoding: drafters, acceptance, and the length of drafts. Nothing yet.

The seam is the batch: a decode row may forward more than one token and return more than one
(core/batch.py). Entry points (server/worker_main.py, LLM) register this package; the core does not
import it.
"""

__all__: list[str] = []
