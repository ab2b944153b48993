"""The tokenizer with its chat templates, the detokenizer, and their worker processes."""

from minisgl.tokenizer.text_stream import TextStream
from minisgl.tokenizer.tokenizer import TextTokenizer, load_vocabulary
from minisgl.tokenizer.vocab import Vocabulary
from minisgl.tokenizer.worker import run_detokenizer, run_tokenizer

__all__ = [
    "TextStream",
    "TextTokenizer",
    "Vocabulary",
    "load_vocabulary",
    "run_detokenizer",
    "run_tokenizer",
]
