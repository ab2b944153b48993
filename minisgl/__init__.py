"""minisgl: a compact, fast inference engine for LLMs. See docs/llm.md and docs/architecture.md."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minisgl.core import SamplingParams
    from minisgl.llm import LLM

__version__ = "0.2.0"

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import LLM and SamplingParams at their first use. The server's front end loads no torch."""
    modules = {"LLM": "minisgl.llm", "SamplingParams": "minisgl.core"}
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(modules[name]), name)
