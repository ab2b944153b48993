"""The offline engine: the server's scheduler and caches without the server."""

from minisgl.llm.llm import LLM
from minisgl.llm.results import Completion, Piece

__all__ = ["LLM", "Completion", "Piece"]
