"""Speculative decoding: the drafts of a step, and their number, chosen by its price.

The engine accepts drafts on the device (minisgl/engine/sampler.py), and the scheduler gives them
pages (minisgl/scheduler/plan.py). Entry points (launch/worker_main.py, LLM) register this package
with `with_speculation`; the core does not import it.
"""

from collections.abc import Callable
from dataclasses import replace

from minisgl.core.batch import DraftLengths
from minisgl.drafts.lengths import PricedLengths
from minisgl.drafts.ngram import NgramDrafts
from minisgl.engine import Extensions

__all__ = ["NgramDrafts", "PricedLengths", "with_ngrams", "with_speculation"]


def with_speculation(method: str | None, extensions: Extensions) -> Extensions:
    """Return `extensions` with drafts. method: EngineConfig.speculative; None: no drafts."""
    return extensions if method is None else with_ngrams(PricedLengths, extensions)


def with_ngrams(lengths: Callable[[int], DraftLengths], extensions: Extensions) -> Extensions:
    """Return `extensions` with n-gram drafts. lengths: as Extensions.draft_lengths."""
    return replace(extensions, draft_lengths=lengths, stages=(*extensions.stages, NgramDrafts))
