"""A model gives the same tokens after its norms have moved into the blocks that read them."""

from pathlib import Path

import pytest
import torch

from minisgl.engine import Engine
from minisgl.models.layer import DecoderLayer
from minisgl.quantization.packed_methods import PackedLinear
from tests.parity.driver import Driver, make_engine
from tests.parity.hybrid_models import MODELS, save
from tests.parity.models import build_model
from tests.parity.packed_models import build_packed

PROMPT = list(range(3, 40))


def engine_of(family: str, folder: Path, quantization: str | None) -> Engine:
    if quantization == "awq":
        path, quantization = build_packed("awq", family, folder).packed, None
    else:
        path = save(family, folder)[1] if family in MODELS else build_model(family, folder)
    return make_engine(path, page_size=16, num_pages=20, quantization=quantization)


def layers_of(engine: Engine) -> list[DecoderLayer]:
    return engine._launcher.runner.model.model.layers


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("qwen3-moe", None),
        ("llama", "awq"),
        ("qwen3_5_moe", None),
        ("qwen3_5_moe", "fp8"),
        ("nemotron_h", None),
    ],
)
def test_folded_norms_change_no_token(
    family: str, quantization: str | None, tmp_path: Path
) -> None:
    """Experts, delta nets and 4-bit linears fold their norms too."""
    engine = engine_of(family, tmp_path, quantization)
    expected = Driver(engine).generate(0, PROMPT, 6)
    for layer in layers_of(engine):
        for norm in (layer.input_layernorm, getattr(layer, "post_attention_layernorm", None)):
            if norm is not None:
                norm.weight.data.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(1))
    changed = Driver(engine).generate(0, PROMPT, 6)
    assert changed != expected, "the norms have no weight in the result"
    engine._launcher.runner.model.fold_norms()
    for layer in layers_of(engine):
        assert layer.input_layernorm.folded
        assert layer.mlp is None or layer.post_attention_layernorm.folded
    assert Driver(engine).generate(0, PROMPT, 6) == changed


@pytest.mark.parametrize(("family", "reads"), [("llama", True), ("qwen3-moe", False)])
def test_sums_are_multiplied_only_for_a_linear_that_reads_the_product(
    family: str, reads: bool, tmp_path: Path
) -> None:
    """Regression: an int4 linear before experts stored products that no kernel read."""
    engine = engine_of(family, tmp_path, "awq")
    engine._launcher.runner.model.fold_norms()
    method = layers_of(engine)[0].mixer.out.method
    assert isinstance(method, PackedLinear)
    assert (method.next_weight is not None) is reads


def test_copies_of_folded_norms_are_buffers_and_no_weights_of_the_checkpoint(
    tmp_path: Path,
) -> None:
    """So the memory of the weights counts them, and they move with the model."""
    model = engine_of("qwen3-moe", tmp_path, "awq")._launcher.runner.model
    weights = model.state_dict().keys()
    model.fold_norms()
    layer = "model.layers.0"
    expected = {f"{layer}.self_attn.qkv_proj.method.norm_weight", f"{layer}.mlp.norm_weight"}
    assert expected <= {name for name, _ in model.named_buffers()}
    assert model.state_dict().keys() == weights
