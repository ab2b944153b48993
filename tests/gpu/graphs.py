"""Chains of kernels that overlap in a CUDA graph."""

from collections.abc import Callable

import torch
from torch import Tensor


def equal_in_a_graph(chain: Callable[[Callable[[], object]], Tensor]) -> Tensor:
    """Check that a chain in a graph gives the results of the chain with waits, to the bit.

    chain: gets the function that it calls between kernels. Returns its result with waits.
    """
    expected = chain(torch.cuda.synchronize).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(lambda: None)
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
    return expected
