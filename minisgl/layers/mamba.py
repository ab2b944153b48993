"""Mamba-2: a mixer whose memory is one matrix for each head (Granite 4)."""

from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from minisgl.kernel.delta import TAPS, DeltaMemory
from minisgl.kernel.dispatch import gated_group_norm, selective_scan
from minisgl.kernel.ssd import SsdWeights
from minisgl.kvcache.pool import KVPool
from minisgl.layers.delta import DeltaRates, DeltaSpec
from minisgl.layers.linear import ColumnParallelLinear, LinearMethod, RowParallelLinear
from minisgl.layers.mixer import ForwardContext, Mixer, MixerBuild
from minisgl.layers.norm import BlockInput, RMSNorm
from minisgl.layers.shards import Placement, Shard, merge, split_heads
from minisgl.layers.states import StateBuild, StatePart


class MambaSpec(NamedTuple):
    """The Mamba-2 mixer of one decoder layer. Heads and groups are those of the whole model.

    groups, heads  head h reads B and C of group h // (heads / groups).
    state_dim      elements of B and C of a group. The state of a head is [state_dim, head_dim].
    head_dim       elements of x of a head.
    layer          as StateSpec.layer.
    """

    groups: int
    heads: int
    state_dim: int
    head_dim: int
    layer: int

    @property
    def inner(self) -> int:
        """The width of x."""
        return self.heads * self.head_dim

    @property
    def delta(self) -> DeltaSpec:
        """The gated delta net with the same memory: a group is a key head."""
        return DeltaSpec(self.groups, self.heads, self.state_dim, self.head_dim, self.layer)

    def weights(self, hidden_size: int) -> int:
        """The number of weights of the projections."""
        return hidden_size * (2 * self.groups * self.state_dim + 3 * self.inner + self.heads)

    def kept(self, build: StateBuild) -> tuple[StatePart, ...]:
        """See StateSpec: the state and the inputs of the convolution before it."""
        return self.delta.kept(build)

    def memory(self, kept: Sequence[Tensor], build: StateBuild) -> DeltaMemory:
        """See StateSpec."""
        return self.delta.memory(kept, build)

    def step_bytes(self, page_size: int) -> int:
        """See StateSpec."""
        return self.delta.step_bytes(page_size)


class MambaRates(DeltaRates):
    """The parameters of decay, and the factor D of x in the output. skip: [H] of this rank."""

    def __init__(self, heads: Shard, parent: str) -> None:
        super().__init__(heads, parent)
        self.skip = nn.Parameter(torch.empty(heads.local, dtype=torch.float32))

    def placements(self, name: str) -> Iterator[Placement]:
        yield from super().placements(name)
        shape, cut = (self.heads.full,), (0, *self.heads.read)
        yield Placement(f"{self.parent}.D", shape, f"{name}.skip", *cut)


class Mamba(Mixer):
    """A Mamba-2 mixer over this rank's H heads and G groups.

    in_proj gives C, B, x, the gate z of the output and the step sizes dt. conv: [2 G N + H P, TAPS]
    with N = state_dim and P = head_dim; bias: [2 G N + H P].
    """

    name = "mamba"

    def __init__(self, spec: MambaSpec, build: MixerBuild) -> None:
        super().__init__()
        tp, linear, self.comm = build.comm.tp, build.linear, build.comm
        groups = split_heads("in_proj", spec.groups, spec.state_dim, tp.rank, tp.size, copies=True)
        heads = split_heads("in_proj", spec.heads, 1, tp.rank, tp.size)
        x = split_heads("in_proj", spec.heads, spec.head_dim, tp.rank, tp.size)
        z, x_rows, b, c, dt = merge("in_proj", (x, x, groups, groups, heads))
        self.in_proj = ColumnParallelLinear(build.size, (c, b, x_rows, z, dt), False, linear)
        x_rows, b, c = merge("conv1d", (x, groups, groups))
        self.spec, self.channels, self.inner = spec, (c, b, x_rows), x.local
        width = x.local + 2 * groups.local
        self.conv, self.bias = (nn.Parameter(torch.empty(width, *n)) for n in ((TAPS,), ()))
        self.rates = MambaRates(heads, linear.parent)
        self.norm = RMSNorm(x, build.eps)
        self.groups = max(spec.groups // tp.size, 1)
        # The ranks with heads of this rank's group, if there are several.
        sharing = tp.size // spec.groups
        first = tp.rank // sharing * sharing if sharing else 0
        self.sharing = slice(first, first + sharing) if sharing > 1 else None
        self.out = RowParallelLinear(x._replace(name="out_proj"), build.size, False, linear)

    @property
    def kind(self) -> Hashable:
        return self.spec._replace(layer=0)

    def state(self, pools: Sequence[KVPool], states: Sequence[Any]) -> Iterator[Tensor | None]:
        yield from states[self.spec.layer]

    def mix(self, block_input: BlockInput, context: ForwardContext) -> Tensor:
        """Update the states of the requests with the T tokens. Returns [T, H * P]."""
        assert context.state_step is not None, (
            "a Mamba-2 mixer needs its part of the step; this is a bug"
        )
        projected, width = self.in_proj.forward(block_input), len(self.conv)
        mixed, rest = projected[:, :width], projected[:, width:]
        gate, dt = rest[:, : self.inner], rest[:, self.inner :]
        rates = self.rates
        weights = SsdWeights(self.conv, self.bias, rates.a_log, rates.dt_bias, rates.skip)
        memory: DeltaMemory = context.states[self.spec.layer]
        out = selective_scan(mixed, dt, weights, memory, context.state_step).flatten(1)
        if self.sharing is None:
            return gated_group_norm(out, self.norm.weight, gate, self.groups, self.norm.eps)
        return self._norm_over_ranks(out, gate, self.sharing)

    def _norm_over_ranks(self, out: Tensor, gate: Tensor, ranks: slice) -> Tensor:
        """Return gated_group_norm of a group whose heads several ranks have."""
        opened = out.float() * functional.silu(gate.float())
        squares = self.comm.gather(opened.square().mean(-1, keepdim=True))[ranks]
        normed = opened * torch.rsqrt(squares.mean(0) + self.norm.eps)
        return normed.to(out.dtype) * self.norm.weight

    def fold(self, norm_weight: Tensor, before: LinearMethod | None = None) -> bool:
        return self.in_proj.method.fold(norm_weight, before)

    def scale_queries(self, factor: float | None) -> None:
        """Do nothing: the factor is for the queries of the model's attention layers."""

    def placements(self, name: str) -> Iterator[Placement]:
        """Yield the placements of the convolution, whose weight is [channels, 1, TAPS]."""
        source, offset, squeeze = f"{name}.conv1d", 0, partial(torch.squeeze, dim=1)
        for shard in self.channels:
            cut = (0, *shard.read, offset)
            shape = (shard.stored, 1, TAPS)
            yield Placement(f"{source}.weight", shape, f"{name}.conv", *cut, convert=squeeze)
            yield Placement(f"{source}.bias", (shard.stored,), f"{name}.bias", *cut)
            offset += shard.local
