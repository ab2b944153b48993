"""Experts with quantised weights: the sizes that are refused, and the scaling of their outputs."""

import pytest
import torch
from torch import Tensor

from minisgl.core import ConfigError
from minisgl.distributed.comm import TPInfo
from minisgl.kernel.packed_order import OrderedWeights, in_order
from minisgl.kernel.packed_weights import PackedWeights
from minisgl.layers.linear import LinearBuild
from minisgl.layers.norm import BlockInput
from minisgl.layers.shards import split_evenly
from minisgl.models.loader import finish
from minisgl.models.quantization import Quantization
from minisgl.moe.block import MoeBlock
from minisgl.moe.experts import ExpertShards
from minisgl.moe.spec import ExpertsSpec
from minisgl.moe.torch_backend import TorchMoe
from minisgl.quantization import packed_methods
from minisgl.quantization.awq import awq
from minisgl.quantization.experts import Fp8Experts
from minisgl.quantization.format import Fp8Format
from minisgl.quantization.settings import fbgemm


def test_a_shared_expert_whose_parts_begin_within_a_block_is_refused() -> None:
    shards = ExpertShards("mlp", 6, 256, split_evenly("", 192, 0, 1), shared=2)
    with pytest.raises(ConfigError, match="192: moe_intermediate_size must be a multiple of 128"):
        Fp8Experts(shards, torch.float32, Fp8Format("block", "weight_scale_inv"))
    Fp8Experts(shards, torch.float32, Fp8Format("channel"))
    Fp8Experts(shards._replace(shared=1), torch.float32, Fp8Format("block", "weight_scale_inv"))


def ordered(weights: PackedWeights, dtype: torch.dtype) -> OrderedWeights:
    """The form on a GPU."""
    return in_order(weights)


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
@pytest.mark.parametrize(
    "quantization",
    [
        awq({"group_size": 32}),
        awq({"group_size": 32, "modules_to_not_convert": ["shared_expert"]}),
        fbgemm({}),
    ],
    ids=["int4", "int4-beside-a-shared-expert", "fp8"],
)
def test_a_scaled_block_multiplies_the_outputs_of_all_its_experts(
    quantization: Quantization, as_on_a_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if as_on_a_gpu:
        monkeypatch.setattr(packed_methods, "prepare", ordered)
    assert quantization.experts is not None
    build = LinearBuild(TPInfo(0, 1), torch.float32, quantization.linear, "mlp")
    spec = ExpertsSpec(4, 2, 64, True, shared=1, shared_gate=False)
    block = MoeBlock(64, spec, build, quantization.experts, TorchMoe(torch.device("cpu")))
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        values = torch.rand(parameter.shape, generator=generator)
        is_codes = parameter.dtype == torch.uint8
        parameter.data.copy_(values * 256 if is_codes else values)
    x = torch.randn(5, 64, generator=generator)

    def output() -> Tensor:
        out: Tensor = block(BlockInput(x), torch.zeros_like(x))[0]
        return out

    with torch.no_grad():
        finish(block)
        before = output()
        block.scale_outputs(0.25)
        torch.testing.assert_close(output(), 0.25 * before)
