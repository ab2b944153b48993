"""Experts with FP8 weights, built without values."""

import pytest
import torch

from minisgl.core import ConfigError
from minisgl.layers.shards import split_evenly
from minisgl.moe.experts import ExpertShards
from minisgl.quantization.experts import Fp8Experts
from minisgl.quantization.format import Fp8Format


def test_a_shared_expert_whose_parts_begin_within_a_block_is_refused() -> None:
    shards = ExpertShards("mlp", 6, 256, split_evenly("", 192, 0, 1), shared=2)
    with pytest.raises(ConfigError, match="192: moe_intermediate_size must be a multiple of 128"):
        Fp8Experts(shards, torch.float32, Fp8Format("block", "weight_scale_inv"))
    Fp8Experts(shards, torch.float32, Fp8Format("channel"))
    Fp8Experts(shards._replace(shared=1), torch.float32, Fp8Format("block", "weight_scale_inv"))
