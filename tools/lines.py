"""Counts the code lines of the package, and those of the benchmarks beside it: `make lines`.

A code line is a line with code: no blank line, no comment and no docstring. The core is the list of
packages in the import contract that keeps optional capabilities out of the core. The files of a
feature are those that only this feature needs; a part of a shared file counts as core.
"""

import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "minisgl"
BENCH = ROOT / "bench"
CONTRACT = "The core does not import optional capabilities"
# By feature: patterns of the files that a build without the feature would not need.
FEATURES = {
    "hybrids": (
        "engine/state_copies.py",
        "engine/states.py",
        "kernel/delta.py",
        "kernel/delta_rule.py",
        "kernel/states.py",
        "kernel/ssd.py",
        "kernel/triton/delta*.py",
        "kernel/triton/history.py",
        "kernel/triton/ssd*.py",
        "kernel/triton/states.py",
        "kvcache/snapshots.py",
        "kvcache/states.py",
        "layers/delta.py",
        "layers/mamba.py",
        "layers/states.py",
        "models/families/granitemoehybrid.py",
        "models/families/nemotron_h.py",
        "models/families/qwen3_5.py",
        "models/families/qwen3_next.py",
    ),
    "draft head": (
        "drafts/head.py",
        "kernel/hidden.py",
        "layers/hidden.py",
        "models/mtp.py",
    ),
    "images": (
        "attention/images.py",
        "core/images.py",
        "engine/images.py",
        "images/*.py",
        "layers/images.py",
        "models/encoder*.py",
        "scheduler/image_check.py",
        "scheduler/image_prices.py",
        "scheduler/image_room.py",
        "scheduler/images.py",
    ),
    "host tier": (
        "core/page_copier.py",
        "engine/host_copies.py",
        "engine/host_lock.py",
        "kvcache/host.py",
        "kvcache/host_parts.py",
    ),
    "sessions": ("kvcache/sessions.py",),
    "four bits": (
        "kernel/packed_*.py",
        "kernel/triton/int4_few.py",
        "kernel/triton/packed*.py",
        "quantization/awq.py",
        "quantization/gptq.py",
        "quantization/integers.py",
        "quantization/nvfp4.py",
        "quantization/packed*.py",
    ),
    "more attention backends": (
        "attention/blocks.py",
        "attention/flash_attention.py",
        "attention/triton.py",
        "attention/trtllm.py",
    ),
    "later families": (
        "models/families/gemma4.py",
        "models/families/glm4_moe.py",
        "models/families/minimax_m2.py",
        "models/families/muse_glimmer.py",
        "models/families/qwen3_vl.py",
        "models/gemma4_layer.py",
        "models/layer_input.py",
    ),
}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_WITHOUT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(text: str) -> int:
    """The number of code lines of a Python file."""
    docstrings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {
        line
        for token in tokens
        if token.type not in _WITHOUT_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - docstrings)


def core_packages() -> list[str]:
    """The names of the packages of the core."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    modules = next(c["source_modules"] for c in contracts["contracts"] if c["name"] == CONTRACT)
    return [module.removeprefix("minisgl.") for module in modules]


def counted() -> tuple[Counter[str], Counter[str]]:
    """The code lines of each package, and the part of them in files of features."""
    features = {
        path for patterns in FEATURES.values() for each in patterns for path in PACKAGE.glob(each)
    }
    lines, of_features = Counter[str](), Counter[str]()
    for path in PACKAGE.rglob("*.py"):
        package, *rest = path.relative_to(PACKAGE).parts
        count = code_lines(path.read_text())
        lines[package if rest else "(top level)"] += count
        if path in features:
            of_features[package] += count
    return lines, of_features


def bench_lines() -> int:
    """The code lines of the benchmarks that are not in the wheel."""
    return sum(code_lines(path.read_text()) for path in BENCH.rglob("*.py"))


def main() -> None:
    """Prints a table: the packages of the core, the core, the other packages, and all packages.

    The last line counts the benchmarks outside the wheel.
    """
    lines, of_features = counted()
    core = core_packages()
    others = [package for package, _ in lines.most_common() if package not in core]
    rows = {each: [each] for each in core} | {"the core": core}
    rows |= {each: [each] for each in others} | {"all packages": [*lines]}
    header = "  in files of features"
    width = len(header)
    sys.stdout.write(f"{'':<14}{'lines':>8}{header}\n")
    for name, packages in rows.items():
        total, special = (sum(of[each] for each in packages) for of in (lines, of_features))
        sys.stdout.write(f"{name:<14}{total:>8,}{special or '':>{width}}\n")
    sys.stdout.write(f"{'bench':<14}{bench_lines():>8,}\n")
    sys.stdout.write(f"features: {', '.join(FEATURES)}\n")


if __name__ == "__main__":
    main()
