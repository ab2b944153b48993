"""Tiny models with 4-bit weights in the formats of published checkpoints, and their references.

Codes, scales and zeros are random. The reference of a model is a float32 checkpoint of the weights
that they stand for, which transformers runs. The code here that packs is written from the formats'
descriptions and is independent of minisgl's.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.parity.fp8_models import FAMILIES

__all__ = ["FORMATS", "Saved", "build_packed"]

_IGNORED = "model.layers.1.self_attn.o_proj"
_QUANTISED = ("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight", "in_proj_qkvz.weight")
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
# The places, in a word, of the output features in the order in which AWQ packs them.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Tensors = dict[str, Tensor]
# Packs codes [N, K], scales [N, G], zeros [N, G] and the group of each column [K].
Pack = Callable[[Tensor, Tensor, Tensor, Tensor], Tensors]


def _words(codes: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack 8 neighbours along `dim` in a word; `order[i]` is the neighbour at place i."""
    codes = codes.movedim(dim, -1).long()
    grouped = codes.reshape(*codes.shape[:-1], -1, 8)
    words = sum(grouped[..., order[place]] << 4 * place for place in range(8))
    assert isinstance(words, Tensor)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return words.movedim(-1, dim).contiguous()


def _awq(codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Tensors:
    return {
        "qweight": _words(codes.T, 1, _AWQ_ORDER),
        "qzeros": _words(zeros.T, 1, _AWQ_ORDER),
        "scales": scales.T.contiguous().half(),
    }


def _gptq(subtracted: int) -> Pack:
    def pack(codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Tensors:
        return {
            "qweight": _words(codes.T, 0),
            "qzeros": _words(zeros.T - subtracted & 15, 1),
            "scales": scales.T.contiguous().half(),
            "g_idx": groups.int(),
        }

    return pack


def _compressed(symmetric: bool, ordered: bool = False) -> Pack:
    def pack(codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Tensors:
        tensors = {
            "weight_packed": _words(codes, 1),
            "weight_scale": scales.to(torch.bfloat16),
            "weight_shape": torch.tensor(codes.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = _words(zeros, 0)
        if ordered:
            tensors["weight_g_idx"] = groups.int()
        return tensors

    return pack


def _nvfp4(codes: Tensor, scales: Tensor, *, name: str, whole: str, divides: bool) -> Tensors:
    return {
        name: codes[:, ::2] | codes[:, 1::2] << 4,
        "weight_scale": (scales * 16).to(torch.float8_e4m3fn),
        whole: torch.tensor([16.0] if divides else 1 / 16),
        "input_global_scale" if divides else "input_scale": torch.tensor(0.37),
    }


def _ct_nvfp4(codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Tensors:
    tensors = _nvfp4(codes, scales, name="weight_packed", whole="weight_global_scale", divides=True)
    return tensors | {"weight_shape": torch.tensor(codes.shape)}


def _modelopt(codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Tensors:
    return _nvfp4(codes, scales, name="weight", whole="weight_scale_2", divides=False)


def _scheme(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", r"re:.*mlp\.gate$", r"re:.*layers\.1\.self_attn\.o_proj"],
    }


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group"}
_AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "lm_head": False}
_GPTQ |= {"dynamic": {r"-:.*layers\.1\.self_attn\.o_proj": {}}}


class Format:
    """A format: its settings, how it packs, and which matrices it can store.

    kept: a part of the names of matrices that stay unquantised.
    group: columns of a group, 0 for all. symmetric: the zeros are 8. ordered: the columns of a
    group are not neighbours.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        pack: Pack,
        group: int,
        symmetric: bool = False,
        ordered: bool = False,
        kept: str = _IGNORED,
    ) -> None:
        self.kept = kept
        self.settings, self.pack, self.group = settings, pack, group
        self.symmetric, self.ordered = symmetric, ordered

    @property
    def is_nvfp4(self) -> bool:
        return self.group == 16


FORMATS = {
    "awq": Format(_AWQ | {"group_size": 64, "modules_to_not_convert": [_IGNORED]}, _awq, 64),
    "awq-128": Format(_AWQ | {"group_size": 128, "modules_to_not_convert": [_IGNORED]}, _awq, 128),
    "awq-shared": Format(
        _AWQ | {"group_size": 64, "modules_to_not_convert": ["shared_expert"]},
        _awq,
        64,
        kept=".shared_expert.",
    ),
    "gptq": Format(_GPTQ | {"group_size": 128, "sym": True}, _gptq(1), 128, symmetric=True),
    "gptq-zeros": Format(_GPTQ | {"group_size": 32, "sym": False}, _gptq(1), 32),
    "gptq-v2": Format(
        _GPTQ | {"group_size": 64, "sym": False, "checkpoint_format": "gptq_v2"}, _gptq(0), 64
    ),
    "gptq-channel": Format(_GPTQ | {"group_size": -1, "sym": True}, _gptq(1), 0, symmetric=True),
    "gptq-order": Format(
        _GPTQ | {"group_size": 64, "sym": False, "desc_act": True}, _gptq(1), 64, ordered=True
    ),
    "compressed": Format(
        _scheme("pack-quantized", **_INT4, group_size=128, symmetric=True),
        _compressed(symmetric=True),
        128,
        symmetric=True,
    ),
    "compressed-zeros": Format(
        _scheme("pack-quantized", **_INT4, group_size=64, symmetric=False),
        _compressed(symmetric=False),
        64,
    ),
    "compressed-channel": Format(
        _scheme("pack-quantized", **_INT4 | {"strategy": "channel"}, symmetric=True),
        _compressed(symmetric=True),
        0,
        symmetric=True,
    ),
    "compressed-order": Format(
        _scheme("pack-quantized", **_INT4, group_size=64, symmetric=True, actorder="group"),
        _compressed(symmetric=True, ordered=True),
        64,
        symmetric=True,
        ordered=True,
    ),
    "compressed-nvfp4": Format(
        _scheme(
            "nvfp4-pack-quantized",
            **_INT4 | {"type": "float", "strategy": "tensor_group"},
            group_size=16,
        ),
        _ct_nvfp4,
        16,
    ),
    "modelopt-nvfp4": Format(
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "exclude_modules": ["lm_head", "*layers.1*o_proj"],
        },
        _modelopt,
        16,
    ),
}


class Saved:
    """packed: the folder of the 4-bit checkpoint. reference: that of the dequantised weights."""

    def __init__(self, folder: Path) -> None:
        self.packed, self.reference = str(folder / "packed"), str(folder / "reference")


def build_packed(form_name: str, family: str, folder: Path) -> Saved:
    """Save a random model in one format, and its reference."""
    saved, form = Saved(folder / f"{form_name}-{family}"), FORMATS[form_name]
    if Path(saved.packed).exists():
        return saved
    torch.manual_seed(0)
    config = FAMILIES[family]()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(saved.reference)
    path = Path(saved.reference) / "model.safetensors"
    tensors = load_file(path)
    stored, rounded = dict(tensors), dict(tensors)
    orders: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith(_QUANTISED) or form.kept in name:
            continue
        rows, columns = tensor.shape
        group = form.group or columns
        order = orders.setdefault(columns, torch.randperm(columns))
        groups = torch.arange(columns) // group
        if form.ordered:  # the groups of columns in their order, as the calibration found it
            groups = groups[order.argsort()]
        codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
        # Exact in float16, bfloat16 and e4m3.
        scales = torch.randint(8, 16, (rows, columns // group)) / 8 * 2.0**-7
        zeros = torch.randint(1, 16, scales.shape)
        zeros = torch.full_like(zeros, 8) if form.symmetric else zeros
        if form.is_nvfp4:
            numbers = _E2M1[(codes & 7).int()] * (1 - 2.0 * (codes >> 3))
        else:
            numbers = codes - zeros[:, groups].float()
        rounded[name] = numbers * scales[:, groups]
        module = name.removesuffix(".weight")
        del stored[name]
        for suffix, part in form.pack(codes, scales, zeros, groups).items():
            stored[f"{module}.{suffix}"] = part
    save_file(rounded, path, {"format": "pt"})
    packed = Path(saved.packed)
    packed.mkdir()
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    made = json.loads((Path(saved.reference) / "config.json").read_text())
    if form_name == "modelopt-nvfp4":
        content = {"producer": {"name": "modelopt"}, "quantization": form.settings}
        (packed / "hf_quant_config.json").write_text(json.dumps(content))
    else:
        made["quantization_config"] = form.settings
    (packed / "config.json").write_text(json.dumps(made))
    return saved
