"""Cases of `python -m bench kernels`: the search for drafts and their verification.

The search reads 4 bytes for each token of a row. 64 rows of 131,072 tokens are 34 MB, so 8 us at a
bandwidth of 4.2 TB/s. All other cases move little data: their expected time is that of one or two
launches in a graph, 2 to 5 us. The expected times are computed. They are not measured yet.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from minisgl.kernel import dispatch

_WIDTH = 4  # tokens that a request forwards
_VOCAB = 150_000

Make = Callable[[], Callable[[], object]]


def draft_cases() -> Iterator[tuple[str, int, Make]]:
    """Yield the fields of a kernels.Case. bytes_moved: the tokens of the rows."""
    for reqs, length in ((1, 4096), (1, 131_072), (64, 4096), (64, 131_072), (256, 4096)):
        yield f"find drafts {reqs} x {length}", 4 * reqs * length, _find(reqs, length)
    for reqs in (1, 64, 256):
        yield f"accept drafts {reqs} x {_WIDTH}", 0, _accept(reqs)


def _int32(values: Tensor) -> Tensor:
    return values.to("cuda", torch.int32)


def _tokens(*shape: int) -> Tensor:
    return torch.randint(0, _VOCAB, shape, device="cuda", dtype=torch.int32)


def _find(reqs: int, length: int) -> Make:
    def make() -> Callable[[], object]:
        pool, rows = _tokens(reqs, length + _WIDTH), _int32(torch.randperm(reqs))
        pool[:, length - 2 : length] = pool[:, 2:4].clone()  # a match at the start of each row
        cached, lengths = torch.full_like(rows, length - 1), torch.full_like(rows, _WIDTH)
        tails = torch.full_like(rows, length + _WIDTH)
        inputs = pool, rows, cached, tails, lengths, _WIDTH
        found, predicted = torch.zeros_like(rows), torch.zeros_like(rows)
        return lambda: dispatch.find_drafts(*inputs, found, predicted)

    return make


def _accept(reqs: int) -> Make:
    def make() -> Callable[[], object]:
        pool, rows = _tokens(reqs, 8192), _int32(torch.randperm(reqs))
        cached, lengths = torch.full_like(rows, 100), torch.full_like(rows, _WIDTH)
        samples, found = torch.ones_like(rows), torch.full_like(rows, _WIDTH - 1)
        first = _int32(torch.arange(reqs) * _WIDTH)
        drawn = _tokens(reqs * _WIDTH)
        finite = torch.ones_like(drawn, dtype=torch.bool)
        requests = (rows, cached, lengths, samples, found, first)
        return lambda: dispatch.accept_drafts(pool, *requests, drawn, finite, reqs, _WIDTH)

    return make
