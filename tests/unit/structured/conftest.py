"""The demo model's tokenizer for grammars, and a compiler that uses it."""

import pytest
from llguidance import LLTokenizer

from minisgl.demo import model_path
from minisgl.structured.library import load_tokenizer
from minisgl.structured.source import GrammarCompiler


@pytest.fixture(scope="session")
def tokenizer() -> LLTokenizer:
    return load_tokenizer(str(model_path()), (0, 2))


@pytest.fixture(scope="session")
def compiler(tokenizer: LLTokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)
