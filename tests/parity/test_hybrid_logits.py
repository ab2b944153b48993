"""Models with recurrent states: the logits of a forward without an engine, against transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.core import ConfigError, EngineConfig
from minisgl.distributed.comm import SingleCommunicator, TPInfo
from minisgl.kernel.fp8_weights import dequantise
from minisgl.layers.delta import GatedDelta
from minisgl.layers.linear import UnquantizedLinear
from minisgl.models.build import build_model, empty_model
from minisgl.models.config import load_model_spec
from minisgl.moe.torch_backend import TorchMoe
from minisgl.quantization import with_quantizations
from minisgl.quantization.linear import Fp8Linear
from tests.parity.fp8_models import build_fp8
from tests.parity.hybrid import CPU, PROMPT, Runner, check_rank
from tests.parity.hybrid_models import EXPERTS, MODELS, save
from tests.unit.distributed.ranks import run_ranks


def logits_of(model: Any) -> np.ndarray[Any, Any]:
    with torch.inference_mode():
        result: np.ndarray[Any, Any] = model(torch.tensor([PROMPT])).logits[0].numpy()
    return result


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, path = save(name, tmp_path)
    check_rank(SingleCommunicator(), path, logits_of(model))


@pytest.mark.parametrize(
    ("name", "quantization", "merged"),
    [
        ("qwen3_5-equal-heads", None, True),
        ("qwen3_next-dense-layer", None, True),
        ("qwen3_5-equal-heads", "fp8", False),
        ("qwen3_5", None, False),  # the rows of its rates fill no tile
    ],
)
def test_the_projection_of_a_delta_net_has_the_rates_if_it_can(
    name: str, quantization: str | None, merged: bool, tmp_path: Path
) -> None:
    """The logits of the same models show that the rows are in their places."""
    spec = load_model_spec(save(name, tmp_path)[1])
    extensions = with_quantizations()
    model, _ = empty_model(
        spec, torch.bfloat16, SingleCommunicator(), TorchMoe(CPU), extensions, quantization
    )
    nets = [module for module in model.modules() if isinstance(module, GatedDelta)]
    assert {net.rates_proj is None for net in nets} == {merged}


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("qwen3_5-ends-with-delta", 2),  # both ranks have the only key head
        ("qwen3_next", 2),
        ("granite4-experts", 2),  # the norm of the only group needs both ranks
        ("nemotron_h", 2),
        pytest.param("granite4-groups", 2, marks=pytest.mark.proof),
        pytest.param("granite4-groups", 4, marks=pytest.mark.proof),
        pytest.param("qwen3_5", 4, marks=pytest.mark.proof),  # each two ranks share a KV head
        pytest.param("qwen3_5_moe", 2, marks=pytest.mark.proof),
        pytest.param("qwen3_next", 4, marks=pytest.mark.proof),
    ],
)
def test_ranks_give_the_logits_of_transformers(name: str, ranks: int, tmp_path: Path) -> None:
    model, path = save(name, tmp_path)
    run_ranks(ranks, tmp_path, check_rank, path, logits_of(model))


@pytest.mark.parametrize(("name", "ranks"), [("qwen3_5", 3), ("qwen3_next", 8), ("granite4", 3)])
def test_a_number_of_ranks_that_does_not_divide_the_heads_is_refused(
    name: str, ranks: int, tmp_path: Path
) -> None:
    spec = load_model_spec(save(name, tmp_path)[1])
    comm = SingleCommunicator(TPInfo(0, ranks))
    with pytest.raises(ConfigError, match="cannot be split over tensor-parallel"):
        empty_model(spec, torch.float32, comm, TorchMoe(CPU), with_quantizations())


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next"])
def test_fused_experts_and_the_tensors_of_a_draft_model_load(name: str, tmp_path: Path) -> None:
    """Published checkpoints have one tensor for each matrix of all experts, and a draft model."""
    model, path = save(name, tmp_path)
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    for layer in range(4):
        parent = f"model.layers.{layer}.mlp.experts"
        tensors = fuse(tensors, parent, EXPERTS["num_experts"])
    tensors["mtp.fc.weight"] = torch.ones(64, 128)
    save_file(tensors, file, {"format": "pt"})
    check_rank(SingleCommunicator(), path, logits_of(model))


def fuse(tensors: dict[str, Any], parent: str, experts: int) -> dict[str, Any]:
    def stacked(matrix: str) -> Any:
        return torch.stack([tensors[f"{parent}.{i}.{matrix}.weight"] for i in range(experts)])

    gate_up = torch.cat((stacked("gate_proj"), stacked("up_proj")), dim=1)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(parent)}
    return kept | {f"{parent}.gate_up_proj": gate_up, f"{parent}.down_proj": stacked("down_proj")}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_blocks_of_fp8_weights_keep_their_scales_in_another_order_of_rows(
    name: str, ranks: int, tmp_path: Path
) -> None:
    """Heads of 256 elements rotate 64 of them, so that rows of one block move apart."""
    saved = build_fp8("block", name, tmp_path)
    spec, plain = load_model_spec(saved.fp8), load_model_spec(saved.reference)
    found = 0
    for rank in range(ranks):
        given: dict[str, Any] = {"device": CPU, "dtype": torch.float32}
        given |= {"comm": SingleCommunicator(TPInfo(rank, ranks))}
        given |= {"extensions": with_quantizations()}
        model = build_model(spec, EngineConfig(model_path=saved.fp8), **given)
        reference = build_model(plain, EngineConfig(model_path=saved.reference), **given)
        expected = dict(reference.named_modules())
        for module_name, module in model.named_modules():
            other = expected[module_name]
            if isinstance(module, Fp8Linear):
                assert isinstance(other, UnquantizedLinear)
                scales = module._blocks._replace(values=module.scales)
                assert torch.equal(dequantise(module.weight, scales, torch.float32), other.weight)
                found += 1
    assert found == ranks * (3 * 2 + 2 + 4 * 2)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
@torch.inference_mode()
def test_a_checkpoint_of_fp8_blocks_gives_the_logits_of_its_dequantised_weights(
    name: str, tmp_path: Path
) -> None:
    saved = build_fp8("block", name, tmp_path)
    comm = SingleCommunicator()
    logits = [
        Runner(path, comm).run(PROMPT, 0, decode=False) for path in (saved.fp8, saved.reference)
    ]
    torch.testing.assert_close(*logits, atol=2e-3, rtol=2e-3)
