"""`Constraints`: turns the constraints of SamplingParams into grammars for the engine."""

from array import array
from functools import cached_property, lru_cache
from typing import Any

import msgspec

from minisgl.core import Grammar, GrammarKind, InvalidRequest, SamplingParams
from minisgl.core.sampling import CONSTRAINTS, MAX_JSON_WHITESPACE
from minisgl.message.messages import CompileGrammar
from minisgl.structured.library import load_tokenizer
from minisgl.structured.source import GrammarCompiler
from minisgl.structured.thinking import thinking_of
from minisgl.structured.whitespace import whitespace_pattern
from minisgl.tokenizer import TextTokenizer

_CACHED_GRAMMARS = 64


class Constraints:
    """Checks and compiles the constraints of one LLM, in the process of the caller."""

    def __init__(self, folder: str, tokenizer: TextTokenizer) -> None:
        self._folder = folder
        self._tokenizer = tokenizer
        self._think_ids = tokenizer.vocabulary.think_ids
        self._source = lru_cache(_CACHED_GRAMMARS)(self._new_source)

    def compile(self, sampling: SamplingParams) -> SamplingParams:
        """Replace the constraint by a Grammar. Raises InvalidRequest if it cannot be enforced."""
        name = next((name for name in CONSTRAINTS if getattr(sampling, name) is not None), None)
        if name is None or isinstance(sampling.grammar, Grammar):
            return sampling
        kind: GrammarKind = name  # type: ignore[assignment]  # each constraint is a kind
        request = CompileGrammar(
            kind=kind,
            text=_text(getattr(sampling, name)),
            whitespace_pattern=whitespace_pattern(MAX_JSON_WHITESPACE),
        )
        start, end = self._think_ids
        grammar = Grammar(source=self._source(request), kind=kind, think_start=start, think_end=end)
        cleared: dict[str, Any] = dict.fromkeys(CONSTRAINTS)
        return msgspec.structs.replace(sampling, **(cleared | {"grammar": grammar}))

    def for_prompt(
        self, sampling: SamplingParams, ids: "array[int]", chat_options: dict[str, Any] | None
    ) -> SamplingParams:
        """Complete the grammar for the answer to this prompt.

        chat_options: variables of the chat template; None: the prompt is not a rendered chat.
        """
        grammar = sampling.grammar
        if not isinstance(grammar, Grammar):
            return sampling
        thinks = chat_options is not None and self._tokenizer.thinks(ids.tolist(), chat_options)
        thinking = thinking_of(ids, self._think_ids, thinks)
        grammar = msgspec.structs.replace(grammar, thinking=thinking)
        return msgspec.structs.replace(sampling, grammar=grammar)

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        """The compiler. The first constraint loads it, because that takes up to a second."""
        # The compilation does not depend on the EOS ids, so this uses one id of no meaning.
        return GrammarCompiler(load_tokenizer(self._folder, (0,)))

    def _new_source(self, request: CompileGrammar) -> str:
        try:
            return self._compiler.check(request).source
        except InvalidRequest as error:
            message = f"{request.kind}: {error.message}"
            raise InvalidRequest(message, param=request.kind, limit=error.limit) from None


def _text(value: Any) -> str:
    """Return the text of a constraint. Raises InvalidRequest for a schema that is not JSON."""
    if callable(described := getattr(value, "model_json_schema", None)):
        value = described()
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"json_schema is not JSON: {error}", param="json_schema") from None
