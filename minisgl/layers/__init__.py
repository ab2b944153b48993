"""Building blocks of models that know about tensor parallelism."""

from minisgl.layers.embedding import VocabMatrix
from minisgl.layers.linear import (
    ColumnParallelLinear,
    GatedLinear,
    RowParallelLinear,
    share_counters,
)
from minisgl.layers.norm import Normed, RMSNorm, Stream, StreamNorm
from minisgl.layers.rotary import LinearRope, Llama3Rope, RopeScaling, YarnRope, rope_table
from minisgl.layers.shards import Part, Placement, Sharded, split_evenly, split_heads

__all__ = [
    "ColumnParallelLinear",
    "GatedLinear",
    "LinearRope",
    "Llama3Rope",
    "Normed",
    "Part",
    "Placement",
    "RMSNorm",
    "RopeScaling",
    "RowParallelLinear",
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
