"""The gated delta net: a mixer whose memory is one matrix for each head (Qwen3-Next, Qwen3.5)."""

from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from minisgl.distributed.comm import TPInfo
from minisgl.kernel.delta import TAPS, DeltaMemory, DeltaWeights, GatedNorm
from minisgl.kernel.dispatch import gated_delta
from minisgl.kernel.tilings import LOWEST_TILE
from minisgl.kvcache.pool import KVPool
from minisgl.layers.linear import (
    ColumnParallelLinear,
    LinearMethod,
    RowParallelLinear,
    UnquantizedLinear,
)
from minisgl.layers.mixer import ForwardContext, Mixer, MixerBuild
from minisgl.layers.norm import BlockInput, RMSNorm
from minisgl.layers.shards import Placement, Shard, merge, split_heads
from minisgl.layers.states import StateBuild, StatePart


class DeltaSpec(NamedTuple):
    """The gated delta net of one decoder layer. Heads are those of the whole model.

    key_heads, value_heads  value head h reads key head h // (value_heads / key_heads).
    key_dim, value_dim      elements of a head. The state of a value head is [key_dim, value_dim].
    layer                   as StateSpec.layer.
    grouped                 the checkpoint stores the rows of all projections by key heads, in the
                            tensors in_proj_qkvz and in_proj_ba.
    state_dtype             the dtype of the state.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    layer: int
    grouped: bool = False
    state_dtype: torch.dtype = torch.float32

    def weights(self, hidden_size: int) -> int:
        """The number of weights of the projections."""
        rows = 2 * self.key_heads * self.key_dim + self.value_heads * (3 * self.value_dim + 2)
        return hidden_size * rows

    def local_heads(self, tp: TPInfo) -> tuple[int, int]:
        """Return the key heads and the value heads of a rank.

        With fewer key heads than ranks, neighbouring ranks each store a copy of one key head.
        """
        return max(self.key_heads // tp.size, 1), self.value_heads // tp.size

    def channels(self, tp: TPInfo) -> int:
        """The channels of the convolution of a rank."""
        keys, values = self.local_heads(tp)
        return 2 * keys * self.key_dim + values * self.value_dim

    def kept(self, build: StateBuild) -> tuple[StatePart, ...]:
        """See StateSpec: the state and the inputs of the convolution before it."""
        _, values = self.local_heads(build.tp)
        state = (values, self.key_dim, self.value_dim)
        tails = (TAPS - 1, self.channels(build.tp))
        return StatePart(state, self.state_dtype), StatePart(tails, build.dtype)

    def memory(self, kept: Sequence[Tensor], build: StateBuild) -> DeltaMemory:
        """See StateSpec."""
        keys, values = self.local_heads(build.tp)
        size, dtype, pages = build.page_size, build.dtype, 2 if build.drafts else 1
        history = (
            StatePart((2 * size, keys, self.key_dim), dtype),
            StatePart((pages * size, values, self.value_dim), torch.float32),
            StatePart((2 * size, values), torch.float32),
            StatePart((16 if build.drafts else TAPS, self.channels(build.tp)), dtype),
        )
        rows, device = build.rows, build.device
        rings = (torch.zeros((rows, *s), dtype=kind, device=device) for s, kind in history)
        return DeltaMemory(*kept, *rings)

    def step_bytes(self, page_size: int) -> int:
        """See StateSpec: the state, its write once in a page, and half a page of history."""
        state = self.value_heads * self.key_dim * self.value_dim * self.state_dtype.itemsize
        deltas = self.value_heads * self.value_dim * torch.float32.itemsize
        return state + state // page_size + (page_size // 2 + 1) * deltas


class DeltaRates(nn.Module):
    """The parameters of decay, which stay in float32. a_log, dt_bias: [Hv] of this rank's heads."""

    chooses_dtypes: ClassVar[bool] = True

    def __init__(self, heads: Shard, parent: str) -> None:
        super().__init__()
        self.heads, self.parent = heads, parent
        self.a_log = nn.Parameter(torch.empty(heads.local, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(heads.local, dtype=torch.float32))

    def placements(self, name: str) -> Iterator[Placement]:
        shape, cut = (self.heads.full,), (0, *self.heads.read)
        yield Placement(f"{self.parent}.A_log", shape, f"{name}.a_log", *cut)
        yield Placement(f"{self.parent}.dt_bias", shape, f"{name}.dt_bias", *cut)


class GatedDelta(Mixer):
    """A gated delta net over this rank's heads: Hk key heads and Hv value heads.

    in_proj gives queries, keys, values and the gate z of the output. rates_proj gives b and a, the
    write strength and the decay; if it is None, in_proj gives them too.
    norm_before: the weight of the norm before the mixer, if the product of rates_proj applies it.
    conv: [2 Hk Dk + Hv Dv, TAPS].
    """

    name = "linear_attn"
    norm_before: Tensor | None

    def __init__(self, spec: DeltaSpec, build: MixerBuild) -> None:
        super().__init__()
        tp, linear = build.comm.tp, build.linear
        key_heads, _ = spec.local_heads(tp)
        keys = spec.key_heads, spec.key_dim, tp.rank, tp.size
        k = split_heads("in_proj_qkv", *keys, copies=not spec.grouped)
        v = split_heads("in_proj_qkv", spec.value_heads, spec.value_dim, tp.rank, tp.size)
        heads = split_heads("in_proj_b", spec.value_heads, 1, tp.rank, tp.size)
        self.spec, self.channels = spec, merge("conv1d", (k, k, v))
        z, a = v._replace(name="in_proj_z"), heads._replace(name="in_proj_a")
        outputs: tuple[Shard, ...] = (*merge("in_proj_qkv", (k, k, v)), z)
        rates: tuple[Shard, ...] = (heads, a)
        if spec.grouped:
            ratio = spec.value_heads // spec.key_heads
            values = ratio * spec.value_dim
            parts = (spec.key_dim, spec.key_dim, values, values)
            outputs = (_grouped("in_proj_qkvz", parts, spec.key_heads, key_heads, tp),)
            rates = (_grouped("in_proj_ba", (ratio, ratio), spec.key_heads, key_heads, tp),)
        self.in_proj = ColumnParallelLinear(build.size, outputs, False, linear)
        self.rates_proj: ColumnParallelLinear | None = None
        self.register_buffer("norm_before", None, persistent=False)
        if self._can_merge(rates):
            self.in_proj = ColumnParallelLinear(build.size, (*outputs, *rates), False, linear)
        else:
            # FP8 checkpoints leave these few rows unquantised, with and without an entry in their
            # lists of such linears.
            plain = linear._replace(method=UnquantizedLinear)
            self.rates_proj = ColumnParallelLinear(build.size, rates, False, plain)
        rows = sum(shard.local for shard in self.channels)
        self.conv = nn.Parameter(torch.empty(rows, TAPS))
        self.rates = DeltaRates(heads, linear.parent)
        self.norm = RMSNorm(Shard("", spec.value_dim, 0, spec.value_dim), build.eps)
        self.out = RowParallelLinear(v._replace(name="out_proj"), build.size, False, linear)

    def _can_merge(self, rates: Sequence[Shard]) -> bool:
        """Whether in_proj can have the rows of `rates` too, which saves a launch.

        Our kernels of products need whole tiles of rows.
        """
        rows = sum(shard.local for shard in rates)
        unquantised = isinstance(self.in_proj.method, UnquantizedLinear)
        return unquantised and rows % LOWEST_TILE == 0

    @property
    def kind(self) -> Hashable:
        return self.spec._replace(layer=0)

    def state(self, pools: Sequence[KVPool], states: Sequence[Any]) -> Iterator[Tensor | None]:
        yield from states[self.spec.layer]

    def mix(self, block_input: BlockInput, context: ForwardContext) -> Tensor:
        """Update the states of the requests with the T tokens. Returns [T, Hv * Dv]."""
        assert context.state_step is not None, (
            "a gated delta net needs its part of the step; this is a bug"
        )
        block_input, rates = self._rates(block_input)
        projected, width = self.in_proj.forward(block_input), len(self.conv)
        mixed, rest = projected[:, :width], projected[:, width:]
        z = rest[:, : self.out.method.shards.inputs.local]
        if rates is None:
            rates = rest[:, z.shape[1] :]
        b, a = rates.chunk(2, dim=-1)
        weights = DeltaWeights(self.conv, self.rates.a_log, self.rates.dt_bias)
        memory: DeltaMemory = context.states[self.spec.layer]
        norm = GatedNorm(self.norm.weight, z, self.norm.eps)
        return gated_delta(mixed, a, b, weights, memory, context.state_step, norm)

    def _rates(self, block_input: BlockInput) -> tuple[BlockInput, Tensor | None]:
        """Return the input of in_proj, and b and a [T, 2 Hv] unless in_proj gives them."""
        if self.rates_proj is None:
            return block_input, None
        x, norm = block_input
        if norm is None:
            return block_input, self.rates_proj.forward(block_input)
        method = self.rates_proj.method
        assert self.norm_before is not None, "a norm that is not folded is pending; this is a bug"
        assert isinstance(method, UnquantizedLinear), "b and a are quantised; this is a bug"
        x, rates = method.normed_product(x, norm, self.norm_before)
        return BlockInput(x), rates

    def fold(self, norm_weight: Tensor, before: LinearMethod | None = None) -> bool:
        """See Mixer: of two linears that read the norm, the one of few rows applies it."""
        if self.rates_proj is None:
            return self.in_proj.method.fold(norm_weight, before)
        self.norm_before = norm_weight.clone()
        return True

    def placements(self, name: str) -> Iterator[Placement]:
        """Yield the placements of the convolution, whose tensor is [channels, 1, TAPS]."""
        source, offset = f"{name}.conv1d.weight", 0
        for shard in self.channels:
            shape, cut = (shard.stored, 1, TAPS), (0, *shard.read, offset)
            squeeze = partial(torch.squeeze, dim=1)
            yield Placement(source, shape, f"{name}.conv", *cut, convert=squeeze)
            offset += shard.local


def _grouped(name: str, parts: tuple[int, ...], full: int, local: int, tp: TPInfo) -> Shard:
    """Return the share of a tensor that stores all parts of a key head side by side.

    parts: the rows of each part for one key head. full, local: the key heads of the model and of
    this rank. The model stores each part for all heads side by side.
    """
    size, first, order = sum(parts), 0, list[int]()
    for rows in parts:
        order += [h * size + first + row for h in range(local) for row in range(rows)]
        first += rows
    return Shard(name, full * size, tp.rank * local * size, local * size, tuple(order))
