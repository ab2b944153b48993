"""The description of a mixture of experts."""

from typing import NamedTuple

from minisgl.moe.base import ClampedSwiglu


class ExpertsSpec(NamedTuple):
    """The mixture of experts of one decoder layer.

    num_experts  experts that the router chooses from.
    top_k        experts that the router chooses for each token.
    inner        inner size of an expert.
    renormalise  whether the routing weights of a token sum to 1.
    shared       further experts, which compute every token. The checkpoint has them as one shared
                 expert, whose inner size is `shared` times that of the others.
    stacked      the experts are those of gpt-oss: one tensor for each matrix of all experts, gate
                 and up interleaved, and biases. The router has a bias too.
    swiglu       the gate of the experts; None: silu(gate) * up.
    """

    num_experts: int
    top_k: int
    inner: int
    renormalise: bool
    shared: int = 0
    stacked: bool = False
    swiglu: ClampedSwiglu | None = None

    @property
    def features(self) -> int:
        """The inner features whose weights a step of many tokens reads: those of all experts."""
        return (self.num_experts + self.shared) * self.inner
