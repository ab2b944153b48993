"""`GrammarService`: the part of a tokenizer worker that checks the grammars of requests."""

import hashlib
import logging
import traceback
from collections import OrderedDict
from functools import partial

import msgspec

from minisgl.core import ConfigError, InvalidRequest
from minisgl.message.messages import CompileGrammar, TokenizeResult
from minisgl.structured.bounded import BoundedProcess
from minisgl.structured.library import load_tokenizer
from minisgl.structured.source import GrammarCompiler

logger = logging.getLogger(__name__)

MAX_CPU_S = 0.09  # to check and compile one grammar; an ordinary schema takes 0.001 s
_CACHED_BYTES = 2**25
_TOO_MUCH = TokenizeResult(
    uid=0,
    error=f"the grammar takes more than {MAX_CPU_S:g} s to compile, or refers too deeply; use "
    "fewer properties, shorter lists of choices, fewer patterns for one value, or shorter chains "
    "of references",
    limit="max_grammar_seconds",
)


class GrammarService:
    """Checks grammars in a bounded process, and remembers the sources of accepted grammars.

    service = GrammarService(model_folder, vocabulary.think_ids)
    service.compile(CompileGrammar(kind="regex", text="[0-9]{4}")).text
    """

    def __init__(self, folder: str, think_ids: tuple[int, int] | None) -> None:
        """Load the tokenizer of a model folder and fork the process.

        think_ids: the ids that open and close thinking; None: the model does not think.
        """
        self._think_ids = think_ids or (-1, -1)
        self._accepted: OrderedDict[bytes, str] = OrderedDict()
        self._cached_bytes = 0
        self._process: BoundedProcess | None = None
        try:
            # The compilation does not depend on the EOS ids, so this uses one id of no meaning.
            compiler = GrammarCompiler(load_tokenizer(folder, (0,)))
        except ConfigError as error:
            logger.warning("structured output is not available: %s", error)
        else:
            self._process = BoundedProcess(partial(_check, compiler), MAX_CPU_S)

    def compile(self, request: CompileGrammar) -> TokenizeResult:
        """Return the source of this grammar, or the error for the client."""
        if self._process is None:
            error = "the tokenizer of this model does not support structured output"
            return TokenizeResult(uid=request.uid, error=error)
        raw = msgspec.json.encode(msgspec.structs.replace(request, uid=0))
        key = hashlib.sha256(raw).digest()
        if key in self._accepted:
            self._accepted.move_to_end(key)
            result = TokenizeResult(uid=0, text=self._accepted[key])
        else:
            reply = self._process.call(raw)
            result = _TOO_MUCH if reply is None else msgspec.json.decode(reply, type=TokenizeResult)
            if result.internal:
                logger.error("checking a grammar failed: %s", result.error)
                result = TokenizeResult(
                    uid=0, error="the grammar could not be checked", internal=True
                )
            elif result.error is None:
                self._accepted[key] = result.text
                self._cached_bytes += len(result.text)
                while self._cached_bytes > _CACHED_BYTES:
                    self._cached_bytes -= len(self._accepted.popitem(last=False)[1])
        return msgspec.structs.replace(result, uid=request.uid, think_ids=self._think_ids)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()


def _check(compiler: GrammarCompiler, raw: bytes) -> bytes:
    """Check one grammar, in the bounded process. Returns the JSON of a TokenizeResult."""
    request = msgspec.json.decode(raw, type=CompileGrammar)
    try:
        result = TokenizeResult(uid=0, text=compiler.source(request))
    except InvalidRequest as error:
        result = TokenizeResult(uid=0, error=error.message, limit=error.limit)
    except RecursionError:
        result = TokenizeResult(uid=0, error="the grammar is nested too deeply")
    # An exception would end the process, and the service with it. The forked process has no thread
    # that writes its log, so its parent logs the traceback.
    except Exception:  # noqa: BLE001
        result = TokenizeResult(uid=0, error=traceback.format_exc(), internal=True)
    return msgspec.json.encode(result)
