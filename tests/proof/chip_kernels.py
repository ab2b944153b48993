"""Compiles the kernels of seven models for one GPU architecture, and prints them as JSON.

python -m tests.proof.chip_kernels ARCH FOLDER, with ARCH 90 for compute capability 9.0. Needs
Triton, a C compiler, a libcuda.so.1, and a package with the name flashinfer, which may be empty.
"""

import ast
import importlib
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import triton
from triton.runtime.jit import JITFunction

import minisgl.kernel.triton
from minisgl.benchmark.models import write_model
from minisgl.compile.dry_run import dry_run
from minisgl.compile.triton_driver import compiling
from minisgl.core import EngineConfig
from minisgl.distributed.comm import TPInfo
from minisgl.drafts import with_speculation
from minisgl.kernel.chips import REGISTERS
from minisgl.models.config import draft_method
from minisgl.quantization import with_quantizations

# Dense in int4, MXFP4 with windows and sinks, gated delta nets in int4 with shared experts and
# images, Mamba-2 with int4 experts, bfloat16 experts with ReLU squared and with SiLU, and FP8
# experts on two ranks.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {"kv_cache_dtype": "fp8", "speculative": "ngram", "quantization": "int4"},
    "gpt-oss-20b": {},
    "qwen3.6-35b-a3b-images": {"speculative": "ngram", "quantization": "int4"},
    "granite-4.0-h-tiny": {"quantization": "int4"},
    "nemotron-3-nano-30b-a3b": {},
    "qwen1.5-moe-a2.7b": {},
    "qwen3-30b-a3b": {"quantization": "fp8", "tp_size": 2},
}
CHUNK_TOKENS = 2048


def main(arch: int, folder: Path) -> None:
    fp8 = arch >= 89
    with compiling(folder / "kernels", arch):
        for name, settings in MODELS.items():
            if not fp8:
                settings = settings | {"kv_cache_dtype": "auto"}
            config = EngineConfig(model_path=write_model(name, folder / name), **settings)
            extensions = with_speculation(draft_method(config), with_quantizations())
            dry_run(config, TPInfo(0, config.tp_size), CHUNK_TOKENS, extensions)
    found = {"compiled": [], "absent": []}
    for name, function in own_kernels().items():
        launched = any(cache[0] for cache in function.device_caches.values())
        found["compiled" if launched else "absent"].append(name)
    too_large, spilling = usage(folder / "kernels")
    print(json.dumps(found | {"too_large": too_large, "spilling": spilling}))


def own_kernels() -> dict[str, Any]:
    """The kernels of minisgl.kernel.triton by file and name, without their device functions."""
    package = minisgl.kernel.triton
    functions = {
        f"{module.name}.{name}": value
        for module in pkgutil.iter_modules(package.__path__)
        for name, value in vars(
            importlib.import_module(f"{package.__name__}.{module.name}")
        ).items()
        if isinstance(value, JITFunction) and value.__module__.endswith(f".{module.name}")
    }
    called = {
        node.id
        for function in functions.values()
        for node in ast.walk(ast.parse(function.src))  # not its docstring, which may name a kernel
        if isinstance(node, ast.Name)
    }
    return {key: value for key, value in functions.items() if key.split(".")[1] not in called}


def usage(folder: Path) -> tuple[list[str], list[str]]:
    """The kernels with more registers than a multiprocessor has, and those that spill registers."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    too_large, spilling = [], []
    for cubin in sorted(folder.rglob("*.cubin")):
        told = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True).stdout
        warps = json.loads(cubin.with_suffix(".json").read_text())["num_warps"]
        registers, stack, local = (
            max(map(int, re.findall(rf"{word}:(\d+)", told))) for word in ("REG", "STACK", "LOCAL")
        )
        if registers * 32 * warps > REGISTERS:
            too_large.append(cubin.stem)
        if stack or local:
            spilling.append(f"{cubin.stem} {max(stack, local)}")
    return too_large, spilling


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
