"""4-bit weights: the matrices that are refused, and those that stay unquantised."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from minisgl.core import ConfigError
from minisgl.layers.linear import UnquantizedLinear
from minisgl.layers.shards import LinearShards, Shard, split_evenly
from minisgl.models.quantization import Quantization
from minisgl.moe.experts import ExpertShards
from minisgl.quantization.awq import awq
from minisgl.quantization.gptq import gptq
from minisgl.quantization.integers import online_int4
from minisgl.quantization.packed_methods import PackedLinear
from minisgl.quantization.settings import modelopt

_ORDERED = {"group_size": 64, "desc_act": True}


def shards(rows: Shard, columns: Shard) -> LinearShards:
    return LinearShards((rows,), columns, bias=False, parent="model.layers.0.mlp")


def whole(name: str, size: int) -> Shard:
    return Shard(name, size, 0, size)


def test_a_matrix_whose_columns_the_group_does_not_divide_is_refused_by_name() -> None:
    matrix = shards(whole("down_proj", 64), whole("", 576))
    expected = r"mlp\.down_proj has 576 columns, which are not whole groups of 128 \(AWQ\)"
    with pytest.raises(ConfigError, match=expected):
        awq({"group_size": 128}).linear(matrix, torch.float32)
    awq({"group_size": 64}).linear(matrix, torch.float32)
    with pytest.raises(ConfigError, match=r"of 128 \(int4\): use --quantization fp8, or leave out"):
        PackedLinear(matrix, torch.float32, online_int4())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 128}, "down_proj has 64 columns on each rank, which are not whole groups"),
        (_ORDERED, r"groups whose columns are not neighbours \(g_idx\).*use one rank"),
    ],
)
def test_columns_that_ranks_cannot_share_are_refused_by_name(
    settings: Mapping[str, Any], message: str
) -> None:
    matrix = shards(whole("down_proj", 64), split_evenly("down_proj", 256, 1, 4))
    with pytest.raises(ConfigError, match=message):
        gptq(settings).linear(matrix, torch.float32)


def test_rows_within_a_word_are_refused_by_name() -> None:
    matrix = shards(split_evenly("up_proj", 264, 1, 4), whole("", 256))
    with pytest.raises(
        ConfigError, match=r"up_proj\.qweight packs 8 rows .* rows 66 to 132 of 264"
    ):
        list(awq({"group_size": 64}).linear(matrix, torch.float32).placements("method"))


@pytest.mark.parametrize(
    "quantization", [modelopt({"quant_algo": "NVFP4"}), gptq(_ORDERED)], ids=["nvfp4", "order"]
)
def test_experts_of_other_weights_are_refused_by_name(quantization: Quantization) -> None:
    experts = ExpertShards("model.layers.0.mlp", 4, 256, split_evenly("", 256, 0, 1))
    assert quantization.experts is not None
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.experts.* are not supported"):
        quantization.experts(experts, torch.float32)


@pytest.mark.parametrize("groups", [[[0, 0, 1, 0], [0, 0, 1, 1]], [[0, 1, 1, 1]] * 2])
def test_groups_of_columns_that_merged_linears_do_not_share_are_refused(
    groups: list[list[int]],
) -> None:
    """Both linears need the same groups, and each group the same number of columns."""
    outputs = (whole("gate_proj", 8), whole("up_proj", 8))
    matrix = LinearShards(outputs, whole("", 32), bias=False, parent="mlp")
    method = gptq({"group_size": 16, "desc_act": True}).linear(matrix, torch.float32)
    assert isinstance(method, PackedLinear)
    method.g_idx.copy_(torch.tensor(groups).repeat_interleave(8, dim=1))
    with pytest.raises(ConfigError, match=r"g_idx of mlp\.gate_proj, mlp\.up_proj"):
        method.finish()


@pytest.mark.parametrize(
    "quantization",
    [
        awq({"modules_to_not_convert": ["mlp"]}),
        gptq({"modules_to_not_convert": ["mlp"]}),
        gptq({"dynamic": {r"-:.*mlp": {}}}),
        gptq({"modules_in_block_to_quantize": [["self_attn.q_proj"], ["self_attn.o_proj"]]}),
    ],
)
def test_ignored_modules_stay_unquantised(quantization: Quantization) -> None:
    matrix = shards(whole("down_proj", 64), whole("", 256))
    assert isinstance(quantization.linear(matrix, torch.float32), UnquantizedLinear)
    other = matrix._replace(parent="model.layers.0.self_attn", outputs=(whole("q_proj", 64),))
    assert isinstance(quantization.linear(other, torch.float32), PackedLinear)


def test_finished_linears_have_the_order_of_the_kernels_in_bfloat16() -> None:
    matrix = shards(whole("q_proj", 64), whole("", 256))
    for dtype, order in ((torch.bfloat16, True), (torch.float16, False)):
        with torch.device("meta"):  # stands for a GPU
            method = PackedLinear(matrix, dtype, online_int4())
        method.finish()
        shapes = {name: tuple(each.shape) for name, each in method.named_parameters()}
        kept = {"codes": (64, 128), "scales": (64, 2)}
        assert shapes == ({"codes": (2, 64, 64), "headers": (2, 64, 1)} if order else kept)
