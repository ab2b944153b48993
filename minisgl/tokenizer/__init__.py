"""Text to tokens and back: the tokenizer, the worker that encodes, the worker that decodes."""

from minisgl.tokenizer.detokenizer import run_detokenizer
from minisgl.tokenizer.stream import TextStream
from minisgl.tokenizer.tokenizer import TextTokenizer
from minisgl.tokenizer.vocab import Vocabulary
from minisgl.tokenizer.worker import run_tokenizer

__all__ = ["TextStream", "TextTokenizer", "Vocabulary", "run_detokenizer", "run_tokenizer"]
