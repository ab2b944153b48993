"""The white space that a grammar allows between two tokens of JSON."""

import re

# _COUNT matches a count in braces. _WHITESPACE matches a regex without counts that has only the
# four characters of JSON's white space and operators.
_COUNT = re.compile(r"\{\d{1,4}(?:,\d{0,4})?\}")
_WHITESPACE = re.compile(r"(?:[ \t\n\r\[\]()*+?|]|\\[tnr]|\\x(?:20|09|0[aAdD]))*")
_MAX_CHARS = 256


def whitespace_pattern(max_chars: int) -> str:
    """Return a regex that matches 1 to max_chars characters of white space; "" if max_chars is 0.

    Without an upper bound, some models write white space until max_tokens.
    """
    return rf"[\x20\x0A\x0D\x09]{{1,{max_chars}}}" if max_chars else ""


def is_json_whitespace(pattern: str) -> bool:
    """True if the text of this regex has only JSON's white space and operators."""
    return len(pattern) <= _MAX_CHARS and bool(_WHITESPACE.fullmatch(_COUNT.sub("", pattern)))
