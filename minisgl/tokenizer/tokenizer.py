"""The tokenizer of a model folder. It converts text and chats to token ids.

It reads tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja. It
does not need torch or transformers, so it loads in milliseconds. A folder without tokenizer.json is
converted first (convert.py).
"""

import math
from pathlib import Path
from typing import Any

import tokenizers

from minisgl.core import ConfigError, InvalidRequest, TokenizerInfo
from minisgl.core.files import read_json
from minisgl.images import ImageSpec
from minisgl.tokenizer.convert import tokenizer_folder
from minisgl.tokenizer.escape import SpecialTokenEscaper
from minisgl.tokenizer.prefixes import ChatPrefixes
from minisgl.tokenizer.renderer import TemplateError
from minisgl.tokenizer.template import TIMEOUT_S, ChatTemplate
from minisgl.tokenizer.vocab import Vocabulary

# A template that contains one of these names can switch thinking on or off.
_THINKING_NAMES = ("<think>", "thinking")


class TextTokenizer:
    """Encodes text and chats, each with BOS exactly once.

    The tokenizer adds BOS to plain text, and the template adds it to a chat.

        TextTokenizer(folder).encode_chat([{"role": "user", "content": "Hello!"}])
    """

    def __init__(
        self,
        folder: str | Path,
        max_template_chars: float = math.inf,
        escape_special_tokens: bool = False,
        template_timeout_s: float = TIMEOUT_S,
        images: ImageSpec | None = None,
    ) -> None:
        """Read the folder. Raises ConfigError that names the wrong file.

        template_timeout_s: the CPU time for loading the chat template, and for rendering a chat.
        escape_special_tokens: `encode_chat` encodes special tokens in the texts of a chat as text.
        images: of a model with images. Special tokens of images in the texts of a chat are always
        encoded as text, because no text is an image.
        """
        folder = tokenizer_folder(folder)
        tokenizer = _read(folder)
        names = ("special_tokens_map.json", "tokenizer_config.json")
        token_map, config = (read_json(folder / n) if (folder / n).exists() else {} for n in names)
        special = _special_tokens(token_map, config)
        source = _template_source(folder, config)
        self._template = None
        if source is not None:
            try:
                self._template = ChatTemplate(
                    source, special, max_template_chars, template_timeout_s
                )
            except TemplateError as error:
                raise ConfigError(f"{folder} has a broken chat template: {error}") from None
        self._renders_thinking = any(name in (source or "") for name in _THINKING_NAMES)
        self._tokenizer = tokenizer
        self._special = special
        self._bos_token = special.get("bos_token", "")
        bos_id = tokenizer.token_to_id(self._bos_token)
        self._prepends_bos = bos_id is not None and tokenizer.encode("").ids[:1] == [bos_id]
        self.vocabulary = Vocabulary.of(tokenizer)
        self._escaper = None
        if (escape_special_tokens or images is not None) and self._template is not None:
            self._escaper = SpecialTokenEscaper(
                tokenizer, self._template, images, images_only=not escape_special_tokens
            )
        self.prefixes = ChatPrefixes(self.encode_chat)

    @property
    def template_variables(self) -> tuple[str, ...]:
        """The variables that the chat template reads."""
        return () if self._template is None else self._template.variables

    @property
    def info(self) -> TokenizerInfo:
        """The properties that clients need."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return TokenizerInfo(
            vocab_size=self._tokenizer.get_vocab_size(),
            chat_template=None if self._template is None else self._template.standalone,
            **{name: self._special.get(name) for name in names},
        )

    def encode_text(self, text: str, add_special: bool = True) -> list[int]:
        """Return the ids of plain text. If the text begins with BOS, no second BOS is added.

        Raises InvalidRequest for text that is not valid Unicode.
        """
        if self._prepends_bos and text.startswith(self._bos_token):
            add_special = False
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special).ids)
        except TypeError:  # The text has a lone surrogate, which UTF-8 cannot encode.
            raise InvalidRequest("the text must not have a lone surrogate", "prompt") from None

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        template_options: dict[str, Any] | None = None,
    ) -> list[int]:
        """The ids of a rendered chat. Raises TemplateError if the template cannot render it."""
        if self._escaper is None:
            return self.encode_text(self.render_chat(messages, template_options), False)
        return self._escaper.encode(messages, template_options or {})

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        template_options: dict[str, Any] | None = None,
    ) -> str:
        """Return the prompt text of a chat. It ends where the answer of the assistant begins."""
        if self._template is None:
            raise TemplateError("this model has no chat template; use /v1/completions")
        return self._template.render(messages, template_options or {})

    def close(self) -> None:
        """End the process of the chat template. A second call does nothing."""
        if self._template is not None:
            self._template.close()

    def thinks(self, prompt: list[int], template_options: dict[str, Any]) -> bool:
        """True if the model may begin its answer to this rendered chat with thinking.

        False if the template does not render thinking, if an option switches the thinking off, or
        if the prompt ends with a closed block of thinking.
        """
        end = self.vocabulary.think_ids[1]
        options = [template_options.get(name) for name in ("enable_thinking", "thinking")]
        if end < 0 or not self._renders_thinking or False in options:
            return False
        after = prompt[len(prompt) - prompt[::-1].index(end) :] if end in prompt else None
        return after is None or bool(self.vocabulary.decode(after, False).strip())


def load_vocabulary(folder: str | Path) -> Vocabulary:
    """The vocabulary of a TextTokenizer, without its chat template. Raises ConfigError."""
    return Vocabulary.of(_read(tokenizer_folder(folder)))


def _read(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    # For a file that it cannot read, the library raises the class Exception and no subclass.
    except Exception as error:  # noqa: BLE001
        raise ConfigError(f"{path} cannot be read: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _special_tokens(*sources: dict[str, Any]) -> dict[str, str]:
    """The special tokens by name, such as bos_token. Later sources override earlier ones.

    In the files, a token is a string or an object with `content`.
    """
    tokens: dict[str, str] = {}
    for source in sources:
        for name, value in source.items():
            content = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(content, str):
                tokens[name] = content
    return tokens


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # Several templates with names.
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
