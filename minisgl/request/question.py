"""`Question`: a message of a call to another process, and the error of its answer."""

from typing import NamedTuple, TypeAlias

from minisgl.core import EngineFailure, ImageRefused, InvalidRequest, RequestError
from minisgl.message import messages

Answer: TypeAlias = messages.TokenizeResult | messages.GrammarResult


class Question(NamedTuple):
    """A message to a tokenizer, or to the compiler of grammars.

    param: the name, in error messages, of the parameter that the question is about.
    """

    message: messages.TokenizeRequest | messages.CompileGrammar
    param: str | None = None

    def failure(self, answer: Answer) -> RequestError | None:
        """The error of an answer, or None."""
        if (error := answer.error) is None:
            return None
        if isinstance(answer, messages.GrammarResult):
            error = f"{self.param}{'' if error.startswith('/') else ': '}{error}"
        elif answer.refused:
            return ImageRefused(error, answer.refused, answer.param, answer.limit)
        if answer.internal:
            return EngineFailure(error, param=self.param)
        return InvalidRequest(error, param=self.param, limit=answer.limit)
