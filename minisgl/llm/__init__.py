"""The offline engine `LLM`: the scheduler and the caches of the server, without the server."""

from minisgl.llm.llm import LLM
from minisgl.llm.results import Completion, Piece

__all__ = ["LLM", "Completion", "Piece"]
