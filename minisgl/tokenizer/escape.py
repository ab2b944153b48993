"""Encodes a rendered chat so that text of the client never becomes a special token.

A template joins its own text and the texts of the client to one string. In this string, a special
token that the template wrote looks the same as one that a client wrote. Two steps tell them apart:

    mark    before rendering, each text of the client that spells a special token, or that ends
            within one, gets a mark after the first character of that token
    encode  after rendering, the special tokens without a mark belong to the template. Each becomes
            a name that no client knows. Then the marks are removed. A second tokenizer encodes the
            whole string. It knows the special tokens by these names only

The text between two special tokens of the template is therefore encoded in one piece, with all its
merges. If no text of a chat spells a special token, the ids equal those of the model's tokenizer.

Limit: a special token that begins in the template's text and ends in a text of the client counts
as a token of the template. No known template writes the first characters of a special token before
such a text.
"""

import itertools
import json
import re
import secrets
from collections.abc import Collection, Iterator
from typing import Any

import tokenizers

from minisgl.tokenizer.template import ChatTemplate, TemplateError

# Code points for private use. Unicode gives them no meaning, so texts rarely contain them.
_MARKS = tuple(chr(code) for code in range(0xE000, 0xF900))
# The number of random marks to try. If a chat contains half of all marks, all 16 trials fail with
# probability 2**-16.
_TRIALS = 16


class SpecialTokenEscaper:
    """Renders and encodes the chats of one model. No text of a chat becomes a special token.

    escaped: the special tokens, as text. Other added tokens, such as <think>, stay tokens in all
    texts, because templates look for them in histories.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, template: ChatTemplate, escaped: Collection[str]
    ) -> None:
        self._template = template
        nonce = secrets.token_hex(16)  # All names have one length: no name contains another.
        self._names = {text: f"{nonce}{n:06x}" for n, text in enumerate(sorted(escaped))}
        self._tokens = re.compile(_any_of(self._names))
        self._beginnings = re.compile(_begins_any_of(self._names))
        self._tokenizer = _renamed(tokenizer, self._names)

    def encode(
        self, messages: list[dict[str, Any]], options: dict[str, Any], timeout_s: float | None
    ) -> list[int]:
        """The ids of a chat. Raises TemplateError if the template cannot render it."""
        mark = self._unused_mark(messages, options)
        text = self._template.render(
            self._marked(messages, mark), self._marked(options, mark), timeout_s
        )
        text = self._tokens.sub(lambda token: self._names[token[0]], text).replace(mark, "")
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        except TypeError:  # The text has a lone surrogate, which UTF-8 cannot encode.
            raise TemplateError("the texts of a chat must not have a lone surrogate") from None

    def _unused_mark(self, *values: Any) -> str:
        """A character that neither the chat nor the template contains."""
        texts = [self._template.source, *itertools.chain.from_iterable(map(_strings, values))]
        for mark in secrets.SystemRandom().sample(_MARKS, _TRIALS):
            if not any(mark in text for text in texts):
                return mark
        raise TemplateError(
            "the chat has too many private characters between U+E000 and U+F8FF; remove them"
        )

    def _marked(self, value: Any, mark: str) -> Any:
        """A copy of a JSON value with marks in its strings."""
        match value:
            case str():
                return self._beginnings.sub(lambda first: first[0] + mark, value)
            case list():
                return [self._marked(item, mark) for item in value]
            case dict():
                return {self._marked(k, mark): self._marked(v, mark) for k, v in value.items()}
        return value


def escaped_tokens(tokenizer: tokenizers.Tokenizer, template: ChatTemplate) -> set[str]:
    """The special tokens, and the other added tokens around the messages of a plain chat.

    The tokenizers of DeepSeek list their role tokens as added tokens that are not special. The
    tokens of reasoning are never escaped, because histories contain them.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    special = {token.content for token in added if token.special}
    try:
        chat = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
        plain = template.render(chat, {}, None)
    except TemplateError:
        plain = ""  # The template accepts other chats only.
    around = {token.content for token in added if token.content in plain}
    kept = {"<think>", "</think>"}
    return {text for text in (special | around) - kept if len(text) > 1 and not text.isspace()}


def _renamed(tokenizer: tokenizers.Tokenizer, names: dict[str, str]) -> tokenizers.Tokenizer:
    """A copy of the tokenizer in which these added tokens have other texts and the same ids.

    The copy also never produces these ids by merges. The vocabulary of a SentencePiece model
    contains control tokens such as <s>, and a merge could otherwise join their characters.
    """
    description = json.loads(tokenizer.to_str())
    model = description["model"]
    for token in description["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(text, text): i for text, i in model["vocab"].items()}
    else:  # Unigram: a list of pairs of text and score.
        model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
    if "merges" in model:
        model["merges"] = [
            pair for pair in model["merges"] if not {"".join(pair), *pair} & names.keys()
        ]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    description["post_processor"] = None  # The post-processor would add a second BOS.
    return tokenizers.Tokenizer.from_str(json.dumps(description))


def _strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value, the names of members included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        items = [*value, *value.values()] if isinstance(value, dict) else value
        for item in items:
            yield from _strings(item)


def _any_of(words: Collection[str]) -> str:
    """A pattern of these words, in which the longest word comes first.

    The pattern is a tree by characters, so a search takes one step for each character.
    """
    if not words:
        return r"(?!)"
    branches = [
        re.escape(first) + (_any_of(rest) if any(rest) else "")
        for first, group in itertools.groupby(sorted(filter(None, words)), lambda word: word[0])
        for rest in [[word[1:] for word in group]]
    ]
    return f"(?:{'|'.join(branches)})" + ("?" if "" in words else "")


def _begins_any_of(words: Collection[str]) -> str:
    """A pattern that matches the first character of each word in a text, not the rest of it.

    The pattern also matches if the text ends within the word: the next text of the client may
    complete the word.
    """
    if not words:
        return r"(?!)"
    branches = [
        f"{re.escape(first)}(?={_follows([word[1:] for word in group])})"
        for first, group in itertools.groupby(sorted(words), lambda word: word[0])
    ]
    return "|".join(branches)


def _follows(rests: list[str]) -> str:
    """A pattern that matches one of `rests`, or the beginning of one at the end of the text."""
    if "" in rests:
        return ""
    branches = [
        re.escape(first) + _follows([rest[1:] for rest in group])
        for first, group in itertools.groupby(rests, lambda rest: rest[0])
    ]
    return f"(?:{'|'.join(branches)}|\\Z)"
