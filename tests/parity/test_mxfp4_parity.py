"""gpt-oss with MXFP4 experts equals transformers with the same weights, dequantised to float32."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from minisgl.core import ConfigError
from minisgl.kernel.mxfp4_weights import by_chunks, dequantise, recode
from tests.parity.driver import Driver, generate, make_engine
from tests.parity.models import FAMILIES, VOCAB_SIZE, build_model, transformers_greedy
from tests.unit.distributed.ranks import run_ranks

TOKENS = 8
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# Inner sizes of the experts. The ranks share whole blocks: with four ranks, only the first one has
# a block of 32. Of the 9 blocks of 288, the first of two ranks has 5, in two chunks, and the second
# one has 4, in one chunk beside one of padding.
SIZES = [32, 288]


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [..., n, 16] and scales [..., n] of a weight [..., n * 32], nearest values."""
    blocks = weight.unflatten(-1, (-1, 32))
    exponents = torch.floor(torch.log2(blocks.abs().amax(-1) / 4)).clamp(-126, 127)
    scaled = blocks / torch.exp2(exponents).unsqueeze(-1)
    nearest = (scaled.abs().unsqueeze(-1) - VALUES).abs().argmin(-1)
    codes = (nearest + 8 * (scaled < 0)).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def build(folder: Path, inner: int) -> tuple[str, str]:
    """Save a model with MXFP4 experts, and its dequantised reference. Returns both folders."""
    name = f"gpt-oss-{inner}"
    assert FAMILIES[name]().intermediate_size == inner
    reference, packed = Path(build_model(name, folder)), folder / "packed"
    shutil.copytree(reference, packed)
    tensors = load_file(reference / "model.safetensors")
    stored = dict(tensors)
    for source in [source for source in tensors if source.endswith(("up_proj", "down_proj"))]:
        # The float32 checkpoint has the matrices transposed.
        codes, scales = quantised(tensors[source].transpose(1, 2))
        del stored[source]
        stored[f"{source}_blocks"], stored[f"{source}_scales"] = codes, scales
        wide = convert_moe_packed_tensors(codes.clone(), scales.clone(), dtype=torch.float32)
        tensors[source] = wide.reshape(tensors[source].shape).contiguous()
    assert len(stored) > len(tensors)
    save_file(tensors, reference / "model.safetensors", {"format": "pt"})
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (packed / "config.json").write_text(json.dumps(config))
    return str(packed), str(reference)


def prompt() -> list[int]:
    return [int(i) for i in np.random.default_rng(0).integers(0, VOCAB_SIZE, 33)]


def test_every_code_and_every_scale_has_the_value_of_transformers() -> None:
    scales = torch.arange(255, dtype=torch.uint8)  # 255 is NaN in the format
    codes = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(255, 16, 16)
    scales = scales[:, None].expand(255, 16).contiguous()
    packed = by_chunks(recode(codes.flatten(1)), 16).contiguous()
    found = dequantise(packed, by_chunks(scales, 1), 16 * 32, torch.float32)
    expected = convert_moe_packed_tensors(
        codes.unsqueeze(0).clone(), scales.unsqueeze(0).clone(), dtype=torch.float32
    )
    # transformers returns the matrix transposed.
    assert torch.equal(found, expected[0].T.reshape(found.shape))


@pytest.mark.parametrize("inner", SIZES)
@pytest.mark.parametrize("chunk", [0, 7])
def test_packed_experts_equal_dequantised_experts(inner: int, chunk: int, tmp_path: Path) -> None:
    packed, reference = build(tmp_path, inner)
    tokens = Driver(make_engine(packed)).generate(0, prompt(), TOKENS, chunk)
    assert tokens == transformers_greedy(reference, prompt(), TOKENS, guess=tokens)


@pytest.mark.parametrize(("inner", "ranks"), [(32, 4), (288, 2)])
def test_ranks_share_the_blocks(inner: int, ranks: int, tmp_path: Path) -> None:
    packed, reference = build(tmp_path, inner)
    found = run_ranks(ranks, tmp_path, generate, packed, prompt(), TOKENS)
    expected = transformers_greedy(reference, prompt(), TOKENS, guess=found[0])
    assert found == [expected] * ranks


def test_random_weights_have_the_deviation_of_other_families(tmp_path: Path) -> None:
    packed, _ = build(tmp_path, 32)
    engine = make_engine(packed, dummy_weight=True)
    layer = engine._launcher.runner.model.model.layers[0]
    experts = layer.mlp.experts
    for codes, scales in (
        (experts.gate_up, experts.gate_up_scales),
        (experts.down, experts.down_scales),
    ):
        matrix = dequantise(codes, scales, 32, torch.float32)
        assert 0.01 < float(matrix.std()) < 0.04
    assert len(set(Driver(engine).generate(0, prompt(), 4))) > 1


def test_sizes_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    path = Path(build_model("gpt-oss", tmp_path))
    config = json.loads((path / "config.json").read_text())
    assert config["intermediate_size"] == 40
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="64 x 40 weights are not whole blocks of 32"):
        make_engine(str(path))
