"""Helpers: the result of a parser for an answer, and the chat templates of the formats."""

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minisgl.tokenizer.request_text import CallParser
from minisgl.tokenizer.template import ChatTemplate
from minisgl.tool_calls.format import Format
from minisgl.tool_calls.formats import FORMATS
from minisgl.tool_calls.schema import parameter_types

TEMPLATES = Path(__file__).with_name("templates")
# The formats whose answers are text with calls in it. The others consist of sections.
TEXT_FORMATS = tuple(name for name, format in FORMATS.items() if isinstance(format, Format))
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@dataclass
class Answer:
    """Content and calls; `pieces` are the deltas in order of arrival."""

    content: str = ""
    names: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    failures: int = 0

    @property
    def calls(self) -> list[tuple[str, Any]]:
        return [(n, json.loads(a)) for n, a in zip(self.names, self.arguments, strict=True)]

    @property
    def everything(self) -> str:
        return self.content + "".join(self.names) + "".join(self.arguments)


def parse(
    format_name: str,
    pieces: Iterable[str],
    parameters: dict[str, Any] | None = None,
    special: Iterable[str] = (),
) -> Answer:
    """Feed the pieces to a parser. special: markers that arrive as special tokens.

    All markers of a format with sections are special tokens. Its pieces are cut at them, too.
    """
    format = FORMATS[format_name]
    marker_ids = dict(enumerate(special))
    parser = format.open(parameter_types(parameters or {}), marker_ids)
    answer = Answer()
    if parser.has_sections:
        marker_ids, pieces = dict(enumerate(format.markers)), _at_markers(format.markers, pieces)
    texts: list[str] = []
    arguments: list[list[str]] = []  # the parts of each call: to add to a string copies it
    for piece in pieces:
        parser.feed(piece, piece in marker_ids.values())
        _take(parser, answer, texts, arguments)
    parser.finish()
    _take(parser, answer, texts, arguments)
    answer.content, answer.arguments = "".join(texts), ["".join(parts) for parts in arguments]
    answer.failures = parser.failures
    return answer


def _at_markers(texts: Iterable[str], given: Iterable[str]) -> Iterator[str]:
    """The pieces, cut before and after each marker. A marker that was cut is whole again."""
    pieces, markers = list(given), "|".join(map(re.escape, texts))
    text = "".join(pieces)
    borders = set(itertools.accumulate(map(len, pieces)))
    for found in re.finditer(markers, text):
        borders -= set(range(found.start(), found.end()))
        borders |= {found.start(), found.end()}
    return cut(text, borders)


def _take(parser: CallParser, answer: Answer, texts: list[str], arguments: list[list[str]]) -> None:
    content, deltas = parser.take()
    texts.append(content)
    for delta in deltas:
        if delta.id:
            assert delta.index == len(answer.names)
            assert not delta.arguments
            answer.names.append(delta.name)
            answer.ids.append(delta.id)
            arguments.append([])
        else:
            assert delta.index == len(answer.names) - 1
            arguments[-1].append(delta.arguments)


def cut(text: str, borders: Iterable[int]) -> Iterator[str]:
    """The text in pieces that end at these positions."""
    begin = 0
    for end in sorted({*borders, len(text)}):
        if 0 < end <= len(text):
            yield text[begin:end]
            begin = end


def load_template(path: Path) -> ChatTemplate:
    return ChatTemplate(path.read_text(encoding="utf-8"), SPECIAL_TOKENS, 1e9)
