"""Speculative decoding: the drafts of a step, and their number, chosen by its price.

The engine accepts drafts on the device (minisgl/engine/sampler.py), and the scheduler gives them
pages (minisgl/scheduler/plan.py). Entry points (launch/worker_main.py, LLM) register this package
with `with_speculation`; the core does not import it.
"""

from collections.abc import Callable
from dataclasses import replace

from minisgl.core.batch import DraftLengths
from minisgl.drafts.head import HeadDrafts
from minisgl.drafts.lengths import HeadLengths, PricedLengths
from minisgl.drafts.ngram import NgramDrafts
from minisgl.engine import Extensions

__all__ = [
    "HeadDrafts",
    "HeadLengths",
    "NgramDrafts",
    "PricedLengths",
    "with_head",
    "with_ngrams",
    "with_speculation",
]


def with_speculation(method: str | None, extensions: Extensions) -> Extensions:
    """Return `extensions` with drafts. method: models.config.draft_method; None: no drafts."""
    if method == "mtp":
        return with_head(HeadLengths, extensions)
    return extensions if method is None else with_ngrams(PricedLengths, extensions)


def with_ngrams(lengths: Callable[[int], DraftLengths], extensions: Extensions) -> Extensions:
    """Return `extensions` with n-gram drafts. lengths: as Extensions.draft_lengths."""
    return replace(extensions, draft_lengths=lengths, stages=(*extensions.stages, NgramDrafts))


def with_head(lengths: Callable[[int], DraftLengths], extensions: Extensions) -> Extensions:
    """Return `extensions` with drafts by the draft head of the model. lengths: as above."""
    return replace(extensions, draft_lengths=lengths, stages=(*extensions.stages, HeadDrafts))
