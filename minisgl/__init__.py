"""minisgl: a compact, fast inference engine for LLMs. See docs/architecture.md."""

__version__ = "0.1.0"

__all__ = ["__version__"]
