"""The tokenizer with its chat templates, the detokenizer, and their worker processes."""

from minisgl.tokenizer.detokenizer import Detokenizer
from minisgl.tokenizer.tokenizer import TextTokenizer, load_vocabulary
from minisgl.tokenizer.vocab import Vocabulary
from minisgl.tokenizer.worker import run_detokenizer, run_tokenizer, tokenize

__all__ = [
    "Detokenizer",
    "TextTokenizer",
    "Vocabulary",
    "load_vocabulary",
    "run_detokenizer",
    "run_tokenizer",
    "tokenize",
]
