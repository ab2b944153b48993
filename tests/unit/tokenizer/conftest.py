"""Small tokenizers of the two families: byte-level, and SentencePiece with byte fallback."""

import pytest
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def byte_level() -> Tokenizer:
    """256 bytes, some merges that cut characters in odd places, two special tokens, one added."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    for text in ("he", "ll", "Ġw", "ðŁ", "ĺĢ", "âĤ"):
        vocab[text] = len(vocab)
    merges = [tuple(text) for text in ("he", "ll", "Ġw", "ðŁ", "ĺĢ", "âĤ")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.add_tokens([tokenizers.AddedToken("<think> now", special=False)])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Words with the ▁ mark and the 256 byte tokens."""
    words = ["▁hello", "▁world", "lo", "▁", "h", "é", "."]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab.update({f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)})
    for word in words:
        vocab[word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@pytest.fixture(scope="session")
def byte_level_tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="session")
def sentencepiece_tokenizer() -> Tokenizer:
    return sentencepiece()
