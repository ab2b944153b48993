"""Loads llguidance's tokenizer, sets its work limits and compiles grammars.

Every process that reads grammars uses these functions, so that a grammar that one process accepts
is within the limits of the others. Nothing here imports torch.
"""

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from minisgl.core import ConfigError, Grammar, GrammarFailed, GrammarKind
from minisgl.tokenizer.convert import tokenizer_folder

# llguidance computes masks in advance for the tokens that match these regexes. Two more regexes in
# its default make no mask faster (bench/notebook/2026-11-26-starts.md, "Vocabulary of grammars").
_SLICES = [r'[^"\\\x00-\x1F\x7F]{1,10}', r'[^"\\\x00-\x1F\x7F]+']
TOO_COMPLEX = "grammar_too_complex"
DEAD_END = "grammar_dead_end"


def load_tokenizer(folder: str, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """Read tokenizer.json of a model folder. Takes about half a second for 150,000 ids.

    eos_token_ids: the EOS ids of the model. Raises ConfigError.
    """
    path = str(tokenizer_folder(folder) / "tokenizer.json")
    try:
        return LLTokenizer(path, eos_token=list(eos_token_ids), slices=_SLICES)
    except BaseException as error:
        # A failed assertion of the library, such as for tokens of more than 256 bytes, raises
        # PanicException, which has no public name and is not an Exception.
        if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"the tokenizer in {folder} cannot serve grammars: {error}") from None


def parser_limits(kind: GrammarKind) -> LLParserLimits:
    """Return the work limits of a grammar. They are counts and not times, so that all ranks agree.

    The library does about 50,000 units of initial_lexer_fuel and 14,000 of step_lexer_fuel in a
    millisecond. A lexer state takes 1 to 2 KB.

    The time of an item is not bounded: a row finds duplicates by a linear search, and an ambiguous
    rule adds each item to a row many times. A grammar of 36 bytes takes 280 ms for one mask with
    rows of 2,000 items, and 5 ms with rows of 250 (bench/notebook/2026-11-23-structured.md).
    The text of a JSON schema is not ambiguous, but optional properties need long rows: 64 of them
    need 255 items, and a schema of MaskBench needs 1,220.
    """
    row, step = (250, 5_000) if kind == "grammar" else (2_000, 10_000)
    return LLParserLimits(
        max_items_in_row=row,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=step,
        max_lexer_states=50_000,
        max_grammar_size=50_000,
        verbose_errors=False,
    )


def compile_grammar(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """Compile a grammar and compute its first mask. Releases the GIL; takes about a millisecond.

    Raises GrammarFailed.

    Each request gets a matcher of its own, and so does each choice of a call. Copies of a matcher
    share a lexer. One choice that exceeds its limits would end the others, in an order that differs
    between the ranks. A copy also waits for the masks of the others: beside a thread that computes
    masks of 0.4 ms, a quick mask takes 0.29 ms of wall time, and 0.05 ms with a matcher of its own.
    A step would so wait for threads of low priority. A copy would take 0.003 ms, and a compilation
    takes 1 to 40 ms. Its cost for other clients is bounded instead: PreparationQueue compiles at
    most 32 choices of a client in advance, and CompileThreads takes turns by client.
    """
    matcher = open_matcher(tokenizer, grammar.source, grammar.kind)
    if matcher.is_error():
        raise failure_of(matcher)
    return matcher


def open_matcher(tokenizer: LLTokenizer, source: str, kind: GrammarKind) -> LLMatcher:
    """Return a matcher that has computed its first mask, or is in its error state.

    source: as in core.Grammar.
    """
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=parser_limits(kind))
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def failure_of(matcher: LLMatcher) -> GrammarFailed:
    """Return the error of a matcher in its error state."""
    reason = matcher.get_error().split("\n")[0]
    if reason == "NoExtensionBias":
        return dead_end("no token of the vocabulary continues the text")
    return GrammarFailed(f"the grammar is too complex: {reason}; simplify it", code=TOO_COMPLEX)


def dead_end(reason: str) -> GrammarFailed:
    """Return the error of a request for which no token is left to choose from."""
    return GrammarFailed(f"no token is left to choose from: {reason}", code=DEAD_END)
