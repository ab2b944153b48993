"""Log-probabilities of a model for one prompt, to compare models with one another."""

import numpy as np
import torch
from torch import Tensor

from minisgl.core.batch import LogprobsRequest
from tests.parity.driver import Driver, Work, make_engine


def logprobs_of_chunks(path: str, ids: list[int], chunks: list[int], **overrides: object) -> Tensor:
    """The log-probabilities of every id after each token of a prompt, float64 [T, V], on the CPU.

    chunks: the number of tokens of each step. Each step runs as a part of a prompt, even with one
    token. overrides: keyword arguments of make_engine.
    """
    assert sum(chunks) == len(ids)
    engine = make_engine(path, **{"device": "cuda", "page_size": 16} | overrides)  # type: ignore[arg-type]
    vocabulary, driver, start = engine.facts().vocab_size, Driver(engine), 0
    parts = []
    for size in chunks:
        wanted = LogprobsRequest(0, -1, vocabulary, targets=np.full(size, -1, dtype=np.int32))
        found = driver.step(Work(0, start, ids[start : start + size]), logprobs=(wanted,))
        assert found.prompt_logprobs is not None
        of_chunk = found.prompt_logprobs[0]
        part = np.empty((size, vocabulary))
        np.put_along_axis(part, of_chunk.top_ids.astype(np.int64), of_chunk.top, axis=1)
        parts.append(torch.from_numpy(part))
        start += size
    engine.close()
    return torch.cat(parts)


def divergences(exact: Tensor, found: Tensor) -> Tensor:
    """The divergence of `found` from `exact` after each token, in nats, [T]."""
    return (exact.exp() * (exact - found)).sum(-1)
