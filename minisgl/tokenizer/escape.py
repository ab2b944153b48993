"""Encodes a rendered chat so that text of the client never becomes a special token.

A template joins its own text and the texts of the client to one string. In this string, a special
token that the template wrote looks the same as one that a client wrote. Two steps tell them apart:

    mark    before rendering, each text of the client that spells a special token, or that ends
            within one, gets a mark after the first character of that token. The mark is a lone
            surrogate. No chat contains one: msgspec refuses it in the JSON of a request
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
from collections.abc import Collection, Sequence
from typing import Any

import tokenizers

from minisgl.images import ImageSpec
from minisgl.tokenizer.renderer import TemplateError
from minisgl.tokenizer.template import ChatTemplate

_MARK = "\ud800"
_OR_END = r"|\Z"
_NOTHING = "(?!)"


class SpecialTokenEscaper:
    """Renders and encodes the chats of one model. No text of a chat becomes a special token.

    The special tokens are those of `_escaped_tokens`. Other added tokens, such as <think>, stay
    tokens in all texts, because templates look for them in histories. The sequence of an image
    (ImageSpec) replaces the token that the template renders for it.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        template: ChatTemplate,
        images: ImageSpec | None = None,
        *,
        images_only: bool = False,
    ) -> None:
        """images: of a model with images; no text becomes an image. images_only: text may become
        any other special token."""
        self._template = template
        escaped = set[str]() if images_only else _escaped_tokens(tokenizer, template)
        ids = () if images is None else (images.image_token, *(images.around or ()))
        escaped |= {*filter(None, map(tokenizer.id_to_token, ids))}
        nonce = secrets.token_hex(16)  # All names have one length: no name contains another.
        names = {text: f"{nonce}{n:06x}" for n, text in enumerate(sorted(escaped))}
        self._tokens, self._written = re.compile(_any_of(names)), names
        if images is not None:
            text = _text_of(images.sequence, tokenizer, names)
            self._written = {**names, str(tokenizer.id_to_token(images.rendered_token)): text}
        # The first character of a special token. The end of the text may cut the token off, because
        # the next text of the client may complete it.
        firsts = {text[0] for text in escaped}
        rests = {first: [text[1:] for text in escaped if text[0] == first] for first in firsts}
        beginnings = [
            f"{re.escape(first)}(?={_any_of(words, _OR_END)})" for first, words in rests.items()
        ]
        self._beginnings = re.compile("|".join(beginnings) or _NOTHING)
        self._tokenizer = _renamed(tokenizer, names)

    def encode(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> list[int]:
        """The ids of a chat. Raises TemplateError if the template cannot render it."""
        text = self._template.render(self._marked(messages), self._marked(options))
        text = self._tokens.sub(lambda token: self._written[token[0]], text).replace(_MARK, "")
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _marked(self, value: Any) -> Any:
        """A copy of a JSON value with marks in its strings."""
        match value:
            case str():
                return self._beginnings.sub(lambda first: first[0] + _MARK, value)
            case list():
                return [self._marked(item) for item in value]
            case dict():
                return {self._marked(key): self._marked(item) for key, item in value.items()}
        return value


def _text_of(
    sequence: Sequence[str | int], tokenizer: tokenizers.Tokenizer, names: dict[str, str]
) -> str:
    """Return a sequence of texts and ids as a text for the second tokenizer."""
    texts = (part if isinstance(part, str) else tokenizer.id_to_token(part) for part in sequence)
    return "".join(names.get(text, text) for text in texts if text is not None)


def _escaped_tokens(tokenizer: tokenizers.Tokenizer, template: ChatTemplate) -> set[str]:
    """The special tokens, and the other added tokens around the messages of a plain chat.

    The tokenizers of DeepSeek list their role tokens as added tokens that are not special. The
    tokens of reasoning are never escaped, because histories contain them.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    special = {token.content for token in added if token.special}
    try:
        chat = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
        plain = template.render(chat, {})
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


def _any_of(words: Collection[str], or_end: str = "") -> str:
    """A pattern of these words, in which the longest word comes first.

    The pattern is a tree by characters, so a search takes one step for each character.

    or_end: _OR_END for a pattern that also matches the beginning of a word at the end of the text.
    """
    branches = [
        re.escape(first) + (_any_of(rest, or_end) if any(rest) else "")
        for first, group in itertools.groupby(sorted(filter(None, words)), lambda word: word[0])
        for rest in [[word[1:] for word in group]]
    ]
    return f"(?:{'|'.join(branches) or _NOTHING}{or_end})" + ("?" if "" in words else "")
