"""Whether a text follows a compiled grammar, token by token through the masks."""

from llguidance import LLTokenizer

from minisgl.core import Grammar
from minisgl.structured.library import compile_grammar


def follows(tokenizer: LLTokenizer, source: str, text: str) -> bool:
    """True if the mask of each position allows the next token of the text, and its end."""
    matcher = compile_grammar(tokenizer, Grammar(source=source, kind="grammar"))
    for token in tokenizer.tokenize_str(text):
        mask = matcher.compute_bitmask()
        if matcher.is_error() or not mask[token >> 3] & (1 << (token & 7)):
            return False
        assert matcher.consume_token(token)
    return matcher.is_accepting()
