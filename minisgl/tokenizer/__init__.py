"""The tokenizer with its chat templates, the detokenizer, and their worker processes."""

from minisgl.tokenizer.text_stream import TextStream
from minisgl.tokenizer.tokenizer import TextTokenizer
from minisgl.tokenizer.vocab import Vocabulary
from minisgl.tokenizer.worker import run_detokenizer, run_tokenizer

__all__ = ["TextStream", "TextTokenizer", "Vocabulary", "run_detokenizer", "run_tokenizer"]
