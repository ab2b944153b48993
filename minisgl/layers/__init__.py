"""Building blocks of tensor-parallel models: linears, norms, embedding, rotary tables."""

from minisgl.layers.embedding import LMHead, ParallelEmbedding
from minisgl.layers.linear import (
    ColumnParallelLinear,
    LinearBuild,
    LinearMethod,
    LinearMethodFactory,
    MergedGateUpLinear,
    QuantizationFactory,
    RowParallelLinear,
    UnquantizedLinear,
    share_split_k_semaphores,
)
from minisgl.layers.norm import BlockInput, ResidualNorm, ResidualStream, RMSNorm
from minisgl.layers.rotary import LinearRope, Llama3Rope, RopeScaling, YarnRope, rope_table
from minisgl.layers.shards import (
    LinearShards,
    Placement,
    Shard,
    Sharded,
    split_evenly,
    split_heads,
)

__all__ = [
    "BlockInput",
    "ColumnParallelLinear",
    "LMHead",
    "LinearBuild",
    "LinearMethod",
    "LinearMethodFactory",
    "LinearRope",
    "LinearShards",
    "Llama3Rope",
    "MergedGateUpLinear",
    "ParallelEmbedding",
    "Placement",
    "QuantizationFactory",
    "RMSNorm",
    "ResidualNorm",
    "ResidualStream",
    "RopeScaling",
    "RowParallelLinear",
    "Shard",
    "Sharded",
    "UnquantizedLinear",
    "YarnRope",
    "rope_table",
    "share_split_k_semaphores",
    "split_evenly",
    "split_heads",
]
