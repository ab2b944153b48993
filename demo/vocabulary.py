"""The tokenizer: byte-level BPE trained on the generators' own training samples.

`python -m demo.vocabulary` writes the tokenizer files into `minisgl/demo`. The training text of the
tokenizer contains no held-out word, so that no held-out word becomes a piece.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo.generate import training_sample
from demo.lexicon import Lexicon
from demo.sample import Sample
from demo.template import CHAT_TEMPLATE, TOOL_TOKENS, turns
from minisgl.demo import model_path

VOCABULARY_SIZE = 1280
CONTEXT_TOKENS = 4096
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

# Letters with an optional space before, single digits, runs of punctuation, white space. There is
# no rule for contractions such as 's: it would split the quoted word 'stone' into 's and tone.
_SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LONGEST_PIECE = 10
_CORPUS_SAMPLES = 40_000


def _corpus(seed: int) -> Iterator[str]:
    rng, lexicon = random.Random(f"tokenizer {seed}"), Lexicon()
    added = re.compile("|".join(TOOL_TOKENS))
    for _ in range(_CORPUS_SAMPLES):
        for turn in turns(training_sample(rng, lexicon)):
            # Answers written letter by letter would add pieces that occur nowhere else.
            if not turn.by_letter:
                yield from added.split(turn.text)
    yield from ("system", "user", "assistant") * 1000


def train_tokenizer(seed: int = 0) -> Tokenizer:
    """Train the tokenizer; the same seed gives the same file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(TOOL_TOKENS),
        special_tokens=[AddedToken(t, normalized=False, special=True) for t in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=_LONGEST_PIECE,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(seed), trainer)
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in TOOL_TOKENS])
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """Return tokenizer_config.json. The tokenizer adds no token before or after a text."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT_TOKENS,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def letter_pieces(tokenizer: Tokenizer) -> list[str]:
    """Return the pieces that can be part of a word, without their leading space."""
    pieces = {piece.removeprefix("Ġ") for piece in tokenizer.get_vocab()}
    return sorted(p.lower() for p in pieces if p.isascii() and p.isalpha())


class Encoder:
    """Turns samples into token ids with a weight class for each token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._start = tokenizer.token_to_id(TURN_START)
        self._end = tokenizer.token_to_id(TURN_END)
        self._newline = self._ids("\n")
        self._roles = {
            role: [self._start, *self._ids(f"{role}\n")] for role in ("system", "user", "assistant")
        }

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def count(self, text: str) -> int:
        """Count the tokens of a text."""
        return len(self._ids(text))

    def encode(self, sample: Sample) -> tuple[list[int], list[bool]]:
        """Return the ids of the whole conversation and which of them the model must produce.

        The model must produce the answers, the tool calls and the end-of-turn token after each.
        The newline after it and all text of the other roles are given.
        """
        ids: list[int] = []
        produced: list[bool] = []

        def add(new: list[int], is_answer: bool) -> None:
            ids.extend(new)
            produced.extend([is_answer] * len(new))

        for turn in turns(sample):
            add(self._roles[turn.role], False)
            parts = turn.text if turn.by_letter else (turn.text,)
            add([i for part in parts for i in self._ids(part)], turn.produced)
            add([self._end], turn.produced)
            add(self._newline, False)
        return ids[: -len(self._newline)], produced[: -len(self._newline)]


def load_tokenizer() -> Tokenizer:
    """Load the shipped tokenizer."""
    return Tokenizer.from_file(str(model_path() / "tokenizer.json"))


def write_files(folder: Path) -> Tokenizer:
    """Train the tokenizer and write its two files."""
    tokenizer = train_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    text = json.dumps(tokenizer_config(), indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text)
    return tokenizer


if __name__ == "__main__":
    print(f"{write_files(model_path()).get_vocab_size()} tokens")
