"""Speculative decoding: the number of draft tokens of a step, chosen by its price.

The engine finds drafts and accepts them on the device (minisgl/engine/drafting.py), and the
scheduler gives them pages (minisgl/scheduler/drafts.py). Entry points (launch/worker_main.py, LLM)
register this package with `with_speculation`; the core does not import it.
"""

from dataclasses import replace

from minisgl.drafts.lengths import PricedLengths
from minisgl.engine import Extensions

__all__ = ["PricedLengths", "with_speculation"]


def with_speculation(method: str | None, extensions: Extensions) -> Extensions:
    """Return `extensions` with drafts. method: EngineConfig.speculative; None: no drafts."""
    return extensions if method is None else replace(extensions, draft_lengths=PricedLengths)
