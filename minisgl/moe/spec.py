"""The description of a mixture of experts."""

from typing import NamedTuple

from minisgl.kernel.activation import Activation, ClampedSwiglu


class ExpertNames(NamedTuple):
    """The names of a layer's experts in the checkpoint, in the module `block` of the layer.

    block           empty: the names begin in the layer itself.
    gate, up, down  the linears of an expert.
    router          the linear of the router.
    factors         the tensor of ExpertsSpec.factors.
    shared          the module of the shared expert.
    correction      the tensor of ExpertsSpec.sigmoid.
    shared_gate_up  the linear of gate and up of the shared expert, if the checkpoint merges them.
    fused           the tensors of gate and up, and of down, in a checkpoint that has one tensor for
                    each matrix of all experts.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    factors: str = "router.per_expert_scale"
    shared: str = "shared_expert"
    correction: str = "gate.e_score_correction_bias"
    shared_gate_up: str = ""
    fused: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")


class ExpertsSpec(NamedTuple):
    """The mixture of experts of one decoder layer.

    num_experts  experts that the router chooses from.
    top_k        experts that the router chooses for each token.
    inner        inner size of an expert.
    renormalise  whether the routing weights of a token sum to 1.
    shared       further experts, which compute every token. The checkpoint has them as one shared
                 expert, whose inner size is `shared` times that of the others.
    shared_gate  whether the sigmoid of a gate multiplies the output of the shared expert.
    sigmoid      the scores of the experts are the sigmoids of their logits instead of a softmax.
                 The router chooses by the sum of score and correction, a value for each expert.
    scale        the factor on the routing weights of the experts that the router chooses.
    stacked      the experts are those of gpt-oss: one tensor for each matrix of all experts, gate
                 and up interleaved, and biases. The router has a bias too.
    activation   of the gate of the experts, or of up if there is no gate.
    factors      the checkpoint has a factor on the output of each expert.
    names        the names in the checkpoint.
    """

    num_experts: int
    top_k: int
    inner: int
    renormalise: bool
    shared: int = 0
    stacked: bool = False
    activation: Activation | ClampedSwiglu = Activation.SILU
    shared_gate: bool = True
    sigmoid: bool = False
    scale: float = 1.0
    factors: bool = False
    names: ExpertNames = ExpertNames()

    @property
    def products(self) -> int:
        """As Activation.products."""
        return self.activation.products

    @property
    def features(self) -> int:
        """The inner features whose weights a step of many tokens reads: those of all experts."""
        return (self.num_experts + self.shared) * self.inner
