"""Loading weights: the ranks' slices make up the checkpoint, and errors name each defect."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minisgl.core import ConfigError, EngineConfig
from minisgl.distributed.comm import SingleCommunicator, TPInfo
from minisgl.engine.check import share_of
from minisgl.models import loader
from minisgl.models.build import ModelExtensions, build_model
from minisgl.models.config import load_model_spec
from minisgl.models.decoder import CausalLM
from minisgl.models.loader import load_weights, placements_of
from tests.parity.models import build_model as save_random_model

CPU = torch.device("cpu")


class Rank(SingleCommunicator):
    """A rank that only loads weights. It exchanges nothing with other ranks."""

    def __init__(self, rank: int, size: int) -> None:
        self.tp = TPInfo(rank, size)


def load(path: Path | str, rank: int = 0, size: int = 1) -> CausalLM:
    config = load_model_spec(str(path))
    engine, comm = EngineConfig(model_path=str(path)), Rank(rank, size)
    return build_model(config, engine, device=CPU, dtype=torch.float32, comm=comm)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")
    return lambda family: Path(save_random_model(family, folder))


def reassemble(models: list[CausalLM], source: str) -> torch.Tensor:
    """Undo the placements of one checkpoint tensor; overlapping copies must agree."""
    parts: list[tuple[int, torch.Tensor]] = []
    dim = 0
    for model in models:
        parameters = dict(model.named_parameters())
        for place in placements_of(model):
            if place.source != source:
                continue
            tensor = parameters[place.target].data
            tensor = tensor if place.expert is None else tensor[place.expert]
            if place.dim is None:
                return tensor
            dim = place.dim
            if place.begin < place.end:
                piece = tensor.narrow(dim, place.offset, place.end - place.begin)
                parts.append((place.begin, piece))
    full: dict[int, torch.Tensor] = {}
    for begin, piece in parts:
        assert begin not in full or torch.equal(full[begin], piece), "replicas differ"
        full[begin] = piece
    return torch.cat([full[begin] for begin in sorted(full)], dim=dim)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("family", ["llama-linear-biases", "mistral", "qwen2", "qwen3-moe"])
def test_ranks_together_hold_the_whole_checkpoint(
    family: str, size: int, saved: Callable[[str], Path]
) -> None:
    """Neither 2 nor 4 divides the vocabulary of 151; 1 or 2 KV heads are fewer than 4 ranks."""
    path = saved(family)
    models = [load(path, rank, size) for rank in range(size)]
    for name, tensor in load_file(path / "model.safetensors").items():
        whole = reassemble(models, name)
        assert torch.equal(whole, tensor), name


def test_padding_is_zero(saved: Callable[[str], Path]) -> None:
    last = load(saved("qwen3"), rank=1, size=2)
    assert last.lm_head.weight.shape[0] == 80
    assert not last.lm_head.weight[71:].any()
    assert last.lm_head.weight[70].any()


def test_ranks_without_token_ids_are_refused(saved: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="151 token ids cannot be split over tensor-parallel 16"):
        load(saved("qwen3"), rank=0, size=16)


def test_heads_that_do_not_divide_are_refused(saved: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"4 heads of o_proj cannot be split over.* 3"):
        load(saved("llama"), rank=0, size=3)


@pytest.fixture
def checkpoint(tmp_path: Path, saved: Callable[[str], Path]) -> Path:
    """A copy of the checkpoint that a test may damage, in two files with an index."""
    source = saved("qwen2-yarn-tied")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    write(tmp_path, load_file(source / "model.safetensors"))
    return tmp_path


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    names = sorted(tensors)
    files = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, members in files.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in files.items() for name in members}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def read(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model-1.safetensors") | load_file(folder / "model-2.safetensors")


def test_several_files_load_with_and_without_index(checkpoint: Path) -> None:
    with_index = load(checkpoint).state_dict()
    (checkpoint / "model.safetensors.index.json").unlink()
    without_index = load(checkpoint).state_dict()
    assert all(torch.equal(with_index[name], without_index[name]) for name in with_index)


def test_harmless_extra_tensors_are_ignored(checkpoint: Path) -> None:
    tensors = read(checkpoint)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    write(checkpoint, tensors)
    load(checkpoint)


def test_missing_tensor_is_named(checkpoint: Path) -> None:
    tensors = read(checkpoint)
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    write(checkpoint, tensors)
    with pytest.raises(ConfigError, match=r"no tensor model\.layers\.1\.self_attn\.k_proj\.bias"):
        load(checkpoint)


@pytest.mark.parametrize("name", ["model.layers.0.adapter.weight", "mtp.0.lm_head.weight"])
def test_unknown_tensor_is_named(checkpoint: Path, name: str) -> None:
    write(checkpoint, read(checkpoint) | {name: torch.ones(2)})
    with pytest.raises(ConfigError, match=f"such as {re.escape(name)}"):
        load(checkpoint)


def test_misshaped_tensor_is_named(checkpoint: Path) -> None:
    write(checkpoint, read(checkpoint) | {"model.norm.weight": torch.ones(63)})
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has shape \[63\], .* \[64\]"):
        load(checkpoint)


@pytest.mark.parametrize(
    ("dtype", "called"),
    [(torch.int8, "I8"), (torch.bool, "BOOL"), (torch.float8_e4m3fn, "F8_E4M3")],
    ids=str,
)
def test_a_tensor_of_a_quantised_type_is_named(
    checkpoint: Path, dtype: torch.dtype, called: str
) -> None:
    """The scales are in other tensors. Without them the copied values would be meaningless."""
    tensors = read(checkpoint)
    name = "model.layers.0.mlp.up_proj.weight"
    write(checkpoint, tensors | {name: tensors[name].to(dtype)})
    with pytest.raises(ConfigError, match=rf"layers\.0\.mlp\.up_proj\.weight is of type {called},"):
        load(checkpoint)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_head_that_differs_from_tied_embeddings_is_named(checkpoint: Path, rank: int) -> None:
    """Versions of transformers disagree on the head to use. Each rank has a row that differs."""
    tensors = read(checkpoint)
    head = tensors["model.embed_tokens.weight"].clone()
    head[[3, 100]] += 1
    write(checkpoint, tensors | {"lm_head.weight": head})
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs .* tie_word_embeddings"):
        load(checkpoint, rank, 2)


@pytest.mark.parametrize("content", [b"", b"not a safetensors file", b"\xff" * 64])
def test_corrupt_file_is_named(checkpoint: Path, content: bytes) -> None:
    (checkpoint / "model-2.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model-2\.safetensors is not a readable") as caught:
        load(checkpoint)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("shape", "up_proj.weight has shape"),
        ("type", "up_proj.weight is of type I8"),
        ("missing", "has no tensor model.layers.0.mlp.up_proj.weight"),
        ("cut", "model-1.safetensors is not a readable"),
    ],
)
def test_headers_alone_show_a_fault_of_a_checkpoint(
    checkpoint: Path, fault: str, expected: str
) -> None:
    """The model is on the meta device, which stores no values."""
    config, added = load_model_spec(str(checkpoint)), ModelExtensions()
    model, _ = share_of(config, TPInfo(0, 1), torch.float32, added)
    load_weights(model, str(checkpoint), headers_only=True)
    tensors, name = read(checkpoint), "model.layers.0.mlp.up_proj.weight"
    whole = tensors.pop(name)
    if fault == "shape":
        tensors[name] = whole[:-1].contiguous()
    elif fault == "type":
        tensors[name] = whole.to(torch.int8)
    if fault == "cut":
        path = checkpoint / "model-1.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
    else:
        write(checkpoint, tensors)
    with pytest.raises(ConfigError, match=re.escape(expected)):
        load_weights(model, str(checkpoint), headers_only=True)


def test_truncated_file_is_named(checkpoint: Path) -> None:
    path = checkpoint / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model-1\.safetensors is not a readable"):
        load(checkpoint)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {"a": "../b.safetensors"}}'])
def test_broken_index_is_named(checkpoint: Path, content: str) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ConfigError, match="index"):
        load(checkpoint)


def test_an_index_that_names_the_wrong_file_is_named(checkpoint: Path) -> None:
    index = checkpoint / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    files = sorted(set(names.values()))
    names["model.norm.weight"] = files[names["model.norm.weight"] == files[0]]
    index.write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ConfigError, match=r"safetensors has no tensor model\.norm\.weight"):
        load(checkpoint)


def test_weights_are_converted_to_the_dtype_of_the_parameters(checkpoint: Path) -> None:
    model = build_model(
        load_model_spec(str(checkpoint)),
        EngineConfig(model_path=str(checkpoint)),
        device=CPU,
        dtype=torch.bfloat16,
        comm=SingleCommunicator(),
    )
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_dummy_weights_are_the_same_each_time(checkpoint: Path) -> None:
    for file in checkpoint.glob("*.safetensors"):
        file.unlink()
    first, second = (
        build_model(
            load_model_spec(str(checkpoint)),
            EngineConfig(model_path=str(checkpoint), dummy_weight=True),
            device=CPU,
            dtype=torch.float32,
            comm=SingleCommunicator(),
        ).state_dict()
        for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not first["model.layers.0.self_attn.qkv_proj.method.bias"].any()
    assert first["model.layers.0.self_attn.qkv_proj.method.weight"].std() > 0.01


class Made(TorchDispatchMode):
    """Records the storages of all results of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[StorageWeakRef] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        tensors = (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        self.storages += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        return result


def test_only_the_parameters_outlive_the_drawing_of_weights(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU keeps the memory of each tensor that lives when the loader frees the temporaries."""
    model, made = load(checkpoint), Made()
    kept = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    alive: list[int] = []

    def free() -> None:
        others = (each for each in made.storages if not each.expired() and each.cdata not in kept)
        alive.extend(each.cdata for each in others)

    monkeypatch.setattr(loader, "_free_temporaries", free)
    with made:
        loader.fill_random(model)
    assert made.storages
    assert not alive
