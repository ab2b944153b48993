"""The offline engine: the server's scheduler and caches, in the caller's own process."""

from minisgl.llm.llm import LLM
from minisgl.llm.results import Completion, Piece

__all__ = ["LLM", "Completion", "Piece"]
