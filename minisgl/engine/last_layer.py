"""The work after the last attention, for the rows that sample."""

from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.models.decoder import CausalLM
from minisgl.models.layer import Attended


class LogitsGraph(NamedTuple):
    """A graph that computes the logits of some rows from the output of the last attention.

    attended: its input. logits: its result. Both have a fixed number of rows.
    """

    graph: torch.cuda.CUDAGraph
    attended: Attended
    logits: Tensor


class LastLayer(NamedTuple):
    """The work after the last attention.

    graphs: for rising numbers of rows; none on a CPU.
    """

    model: CausalLM
    graphs: tuple[LogitsGraph, ...] = ()

    def logits(self, attended: Attended) -> Tensor:
        """Return the logits of the rows that sample. The next graph that runs overwrites them."""
        rows = len(attended.heads)
        for graph, inputs, logits in self.graphs:
            if len(logits) >= rows:
                for target, part in zip(inputs, attended, strict=True):
                    target[:rows] = part
                graph.replay()
                return logits[:rows]
        return self.model.logits(attended)
