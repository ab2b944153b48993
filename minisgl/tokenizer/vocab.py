"""The bytes of each token id: a table that is built once from the tokenizer's own description.

Text is decoded from these bytes, and not by `decode` or `DecodeStream` of the tokenizers library.
Both withhold or drop incomplete characters, and cannot be flushed. With a table of bytes, the
pieces of a stream always join to the text of all tokens decoded together. Invalid bytes become
U+FFFD as in the library: each maximal subpart of a character becomes one U+FFFD.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from minisgl.core import ConfigError

# The tokens around thinking, and the name after the first one: of most models, and of Gemma 4.
_THINKING = (("<think>", "</think>", ""), ("<|channel>", "<channel|>", "thought"))
_SENTENCEPIECE_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Vocabulary:
    """The bytes of each id, and the special ids. Ids beyond the table have no text.

    think_ids: the ids of the tokens around thinking; -1 if the tokenizer does not have both. They
    are <think> and </think>, or those of Gemma 4.
    think_name: the name with which thinking begins after its first token; "": it has none.
    """

    _table: list[bytes]
    _special_ids: frozenset[int]
    think_ids: tuple[int, int] = (-1, -1)
    think_name: str = ""

    def token_bytes(self, token_id: int, skip_special: bool = True) -> bytes:
        """The bytes of this token; b"" for an unknown id and for a special id that is skipped."""
        return self.join((token_id,), skip_special)

    def special_ids(self, texts: Collection[str]) -> dict[int, str]:
        """Map the id of each special token that has one of these texts to its text."""
        names = {text.encode(): text for text in texts}
        return {i: names[self._table[i]] for i in self._special_ids if self._table[i] in names}

    def single_tokens(self, texts: Collection[str]) -> dict[str, int]:
        """Map each of these texts that is one token to the id of the token."""
        names = {text.encode(): text for text in texts}
        return {names[data]: i for i, data in enumerate(self._table) if data in names}

    def join(self, token_ids: Sequence[int], skip_special: bool = True) -> bytes:
        """The bytes of these ids, one after the other, as token_bytes gives them."""
        table, skipped = self._table, self._special_ids if skip_special else ()
        size = len(table)
        return b"".join([table[i] for i in token_ids if 0 <= i < size and i not in skipped])

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of these ids. An incomplete or invalid character becomes U+FFFD."""
        return self.join(token_ids, skip_special).decode("utf-8", "replace")

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer) -> "Vocabulary":
        """Build the table. Raises ConfigError for a decoder that is not supported."""
        steps = _decoder_steps(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocab.values(), default=-1) + 1)
        kinds = {step["type"] for step in steps}
        if "ByteLevel" in kinds:
            alphabet = _byte_level_alphabet()
            for text, token_id in vocab.items():
                table[token_id] = _byte_level_bytes(text, alphabet)
        elif kinds and kinds <= _SENTENCEPIECE_STEPS:
            replacements = _replacements(steps)
            byte_tokens = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
            fallback = byte_tokens if "ByteFallback" in kinds else {}
            for text, token_id in vocab.items():
                plain = text
                for old, new in replacements:
                    plain = plain.replace(old, new)
                table[token_id] = fallback.get(text) or plain.encode()
        else:
            names = ", ".join(sorted(kinds)) or "none"
            raise ConfigError(
                f"tokenizer.json has a decoder that minisgl does not support ({names}); "
                "supported are ByteLevel and SentencePiece with byte fallback"
            )
        special = frozenset(i for i, token in added.items() if token.special)
        for start, end, name in _THINKING:
            if start in vocab and end in vocab:
                return cls(table, special, (vocab[start], vocab[end]), name)
        return cls(table, special)


def _decoder_steps(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    described: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return list(described.get("decoders", [described]))


def _replacements(steps: list[dict[str, Any]]) -> list[tuple[str, str]]:
    pairs = []
    for step in steps:
        if step["type"] == "Metaspace":
            pairs.append((step["replacement"], " "))
        elif step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None:
                raise ConfigError("tokenizer.json: a decoder with a regex is not supported")
            pairs.append((pattern, step["content"]))
    return pairs


def _byte_level_alphabet() -> dict[str, int]:
    """The characters that stand for the 256 bytes in byte-level BPE: bytes_to_unicode of GPT-2."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(256 + n): byte for n, byte in enumerate(others)}


def _byte_level_bytes(text: str, alphabet: dict[str, int]) -> bytes:
    try:
        return bytes([alphabet[char] for char in text])
    except KeyError:  # An added token is written as plain text.
        return text.encode()
