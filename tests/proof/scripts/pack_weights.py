"""Quantises a model folder to 4 bits: `pack_weights.py SOURCE SCHEME GROUP PACKED REFERENCE`.

compressed-tensors rounds each weight to the nearest code (SCHEME: int4, int4-zeros or nvfp4), packs
the codes to PACKED, and unpacks them to float32 weights in REFERENCE. It needs the packages
compressed-tensors and loguru.
"""

import json
import shutil
import sys
from pathlib import Path

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file

FORMATS = {
    "int4": "pack-quantized",
    "int4-zeros": "pack-quantized",
    "nvfp4": "nvfp4-pack-quantized",
}


def pack(source: Path, name: str, group: int, packed: Path, reference: Path) -> None:
    """Write each config.json last, so that a folder with this file is complete."""
    is_nvfp4 = name == "nvfp4"
    args = QuantizationArgs(
        num_bits=4,
        type="float" if is_nvfp4 else "int",
        strategy="tensor_group" if is_nvfp4 else "group",
        group_size=group,
        symmetric=name != "int4-zeros",
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(FORMATS[name])
    tensors = load_file(source / "model.safetensors")
    stored, rounded = dict(tensors), dict(tensors)
    for full, weight in tensors.items():
        if not full.endswith("_proj.weight"):
            continue
        groups = weight.view(len(weight), -1, group)
        whole = generate_gparam(weight.min(), weight.max()) if is_nvfp4 else None
        bounds = groups.amin(-1), groups.amax(-1)
        scales, zeros = calculate_qparams(*bounds, args, global_scale=whole)
        state = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}
        if whole is not None:
            state["weight_global_scale"] = whole
        compressed = compressor.compress(state, scheme)
        module = full.removesuffix("weight")
        del stored[full]
        stored |= {module + part: tensor for part, tensor in compressed.items()}
        rounded[full] = compressor.decompress(compressed, scheme)["weight"].float()
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    groups_of = {"group_0": scheme}
    settings = QuantizationConfig(
        config_groups=groups_of, format=FORMATS[name], quantization_status="compressed", ignore=[]
    )
    quantised = config | {"quantization_config": settings.model_dump(mode="json")}
    for folder, content, made in ((packed, stored, quantised), (reference, rounded, config)):
        unneeded = shutil.ignore_patterns("model.safetensors", "config.json")
        shutil.copytree(source, folder, ignore=unneeded, dirs_exist_ok=True)
        contiguous = {key: tensor.contiguous() for key, tensor in content.items()}
        save_file(contiguous, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(made), encoding="utf-8")


if __name__ == "__main__":
    origin, scheme_name, size, *targets = sys.argv[1:]
    pack(Path(origin), scheme_name, int(size), *map(Path, targets))
