"""The offline engine `LLM`: the server's scheduler and engine in the caller's program."""

from minisgl.llm.llm import LLM
from minisgl.llm.results import Completion, Logprob, Piece, ToolCall

__all__ = ["LLM", "Completion", "Logprob", "Piece", "ToolCall"]
