"""Building blocks of models that know about tensor parallelism."""

from minisgl.layers.embedding import VocabMatrix
from minisgl.layers.linear import (
    ColumnParallelLinear,
    MergedGateUpLinear,
    RowParallelLinear,
    share_counters,
)
from minisgl.layers.norm import Normed, RMSNorm, Stream, StreamNorm
from minisgl.layers.rotary import LinearRope, Llama3Rope, RopeScaling, YarnRope, rope_table
from minisgl.layers.shards import Placement, Shard, Sharded, split_evenly, split_heads

__all__ = [
    "ColumnParallelLinear",
    "LinearRope",
    "Llama3Rope",
    "MergedGateUpLinear",
    "Normed",
    "Placement",
    "RMSNorm",
    "RopeScaling",
    "RowParallelLinear",
    "Shard",
    "Sharded",
    "Stream",
    "StreamNorm",
    "VocabMatrix",
    "YarnRope",
    "rope_table",
    "share_counters",
    "split_evenly",
    "split_heads",
]
