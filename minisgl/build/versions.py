"""The versions of optional packages, and the differences between those of FlashInfer.

Only one other file asks for a name that only some versions have: kernel/delta_rule.py, which may
not import this package. The supported versions are in pyproject.toml; docs/support.md tells which
of them ran. The code that names FlashInfer 0.6 goes when pyproject.toml requires 0.7.

0.6   The fa2 wrappers run the module of gen_batch_prefill_module. The package flashinfer_jit_cache
      has one folder of modules, which get_jit_cache_dir returns.
0.7   The fa2 wrappers run a module for keys and values with equal strides, as those of our pools
      are, and compile a second module at the first call with others. flashinfer_jit_cache names a
      provider for each set of modules that fit the same GPUs (get_jit_cache_providers).

torch 2.11 to 2.15 with Triton 3.6 to 3.9, and transformers 5.17 to 5.24, have no difference that
minisgl meets.
"""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version  # transformers requires packaging


def package_obstacle(package: str, oldest: str, remedy: str) -> str | None:
    """Return the reason why `package` cannot be used: absent, or older than `oldest`. None: it can.

    oldest: such as 0.7 or 4.0.0b36. remedy: the command that installs the package.
    """
    try:
        found = version(package)
    except PackageNotFoundError:
        return f"the package {package} is not installed ({remedy})"
    if Version(found) < Version(oldest):
        return f"it needs {package} {oldest} or later, not {found} ({remedy})"
    return None


def prefill_generator(variant: str) -> Callable[..., Any]:
    """FlashInfer's function that returns the JitSpec of a batch prefill module of `variant`.

    The wrappers of the installed FlashInfer run this module.
    """
    from flashinfer.jit.attention import modules

    equal_strides = getattr(modules, "_gen_batch_prefill_primary_module", None)  # 0.7
    of_variant = equal_strides if variant == "fa2" else None
    generator: Callable[..., Any] = of_variant or modules.gen_batch_prefill_module
    return generator


# The file __init__.py of the package flashinfer_jit_cache, for both versions. Each folder of
# `modules` has a module and the list of its architectures.
JIT_CACHE_PACKAGE = '''"""Modules of FlashInfer {version}, compiled by minisgl compile."""

from pathlib import Path
from types import SimpleNamespace

__version__ = "{version}"

_MODULES = Path(__file__).parent / "modules"


def get_jit_cache_dir() -> str:
    return str(_MODULES)


def get_jit_cache_providers() -> list[SimpleNamespace]:
    return [
        SimpleNamespace(
            provider_id=archs.parent.name,
            distribution=__name__,
            version=__version__,
            jit_cache_dir=str(_MODULES),
            cuda_architectures=archs.read_text().split(),
            modules=[archs.parent.name],
        )
        for archs in sorted(_MODULES.glob("*/{archs}"))
    ]
'''
ARCHS_FILE = "architectures.txt"  # of a module, as sm90a sm100a
