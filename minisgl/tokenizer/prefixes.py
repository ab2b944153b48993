"""The prefixes of a chat with which other chats may begin.

The next turn of a chat begins with all tokens before the generation prompt: the tokens that the
template adds so that the assistant answers. It may leave thinking out of the answer. Other chats
begin with the same system message.
"""

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any, TypeAlias

from minisgl.tokenizer.renderer import TemplateError

Chat: TypeAlias = list[dict[str, Any]]
# The ids of a rendered chat, with these options of the template.
Encode: TypeAlias = Callable[[Chat, dict[str, Any]], list[int]]

MIN_FIRST_CHARS = 2048  # a shorter system message is not encoded a second time
_USER: dict[str, Any] = {"role": "user", "content": "a"}


class ChatPrefixes:
    """Finds the prefixes of chats, by rendering short chats with the same template."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._ending = lru_cache(64)(self._encode_ending)
        self._beginning = lru_cache(16)(self._encode_beginning)

    def find(self, ids: Sequence[int], chat: Chat, options: dict[str, Any]) -> tuple[int, int]:
        """Return the numbers of tokens before the generation prompt and in the first message.

        ids: of the rendered chat. A number is 0 if it is not known.
        """
        ending = self._ending(json.dumps({**options, "tools": None}))
        size = len(ending)
        stable = len(ids) - size if size and tuple(ids[-size:]) == ending else 0
        system = chat[0].get("role") in ("system", "developer")
        if not system or len(chat) < 2 or len(str(chat[0].get("content"))) < MIN_FIRST_CHARS:
            return stable, 0
        beginning = self._beginning(json.dumps([chat[0], options]))
        equal = takewhile(lambda pair: pair[0] == pair[1], zip(ids, beginning, strict=False))
        return stable, sum(1 for _ in equal)

    def _encode_ending(self, options_json: str) -> tuple[int, ...]:
        """Return the ids of the generation prompt; none if it is no suffix."""
        options = json.loads(options_json)
        try:
            whole = self._encode([_USER], options)
            plain = {**options, "add_generation_prompt": False}
            chat = self._encode([_USER], plain)
        except TemplateError:
            return ()
        return tuple(whole[len(chat) :]) if whole[: len(chat)] == chat else ()

    def _encode_beginning(self, first_json: str) -> tuple[int, ...]:
        """Return the ids of a chat with this first message and a short second one."""
        first, options = json.loads(first_json)
        plain = {**options, "add_generation_prompt": False, "continue_final_message": False}
        try:
            return tuple(self._encode([first, _USER], plain))
        except TemplateError:
            return ()
