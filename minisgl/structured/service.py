"""The process that checks and compiles the grammars, JSON schemas and tools of requests."""

import logging
import signal
import time
import traceback
from functools import partial
from typing import NoReturn

import msgspec

from minisgl.core import ConfigError, InvalidRequest
from minisgl.message import messages
from minisgl.message.messages import CompileGrammar, GrammarResult
from minisgl.message.queues import Receiver, Sender, endpoint
from minisgl.structured.compile_threads import LOW_PRIORITY, STACK_BYTES
from minisgl.structured.library import load_tokenizer
from minisgl.structured.source import GrammarCompiler, WriteTools
from minisgl.utils.bounded import BoundedProcess, Bounds
from minisgl.utils.turns import Turns

logger = logging.getLogger(__name__)

# For one grammar. An ordinary schema takes 0.001 s and less than 1 MiB. llguidance bounds most of
# its work by counters, but not all: a schema of 1 KB can take minutes and gigabytes.
BOUNDS = Bounds(0.09, 2**29, stack_bytes=STACK_BYTES, niceness=LOW_PRIORITY)
_NAME = "the process for grammars"
_TOO_MUCH = GrammarResult(
    uid=0,
    error=f"the grammar takes more than {BOUNDS.cpu_s:g} s or {BOUNDS.memory_bytes >> 20} MiB to "
    "compile, or refers too deeply; use fewer properties, shorter lists of choices, fewer patterns "
    "for one value, or shorter chains of references",
    limit="max_grammar_seconds",
)


class GrammarService:
    """Checks grammars in a bounded process.

    service = GrammarService(model_folder, vocabulary.think_ids, write_tools)
    service.compile(CompileGrammar(kind="regex", text="[0-9]{4}")).grammar
    """

    def __init__(
        self, folder: str, think_ids: tuple[int, int], write_tools: WriteTools | None = None
    ) -> None:
        """Load the tokenizer of a model folder and fork the process.

        think_ids, write_tools: as in GrammarCompiler.
        """
        self._process: BoundedProcess | None = None
        try:
            # The compilation does not depend on the EOS ids, so this uses one id of no meaning.
            compiler = GrammarCompiler(load_tokenizer(folder, (0,)), write_tools, think_ids)
        except ConfigError as error:
            logger.warning("structured output is not available: %s", error)
        else:
            self._process = BoundedProcess(_NAME, partial(_check, compiler), BOUNDS)

    def compile(self, request: CompileGrammar) -> GrammarResult:
        """Return the source of this grammar, or the error for the client."""
        if self._process is None:
            error = "the tokenizer of this model does not support structured output"
            return GrammarResult(uid=request.uid, error=error)
        reply = self._process.call(msgspec.msgpack.encode(request))
        if isinstance(reply, signal.Signals):
            return msgspec.structs.replace(_TOO_MUCH, uid=request.uid)
        result = msgspec.msgpack.decode(reply, type=GrammarResult)
        if result.internal:
            logger.error("checking a grammar failed: %s", result.error)
            result = msgspec.structs.replace(result, error="the grammar could not be checked")
        return result

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()


def run_grammars(service: GrammarService, name: str, socket_dir: str) -> NoReturn:
    """Serve the queue `name` until the process ends: compile one grammar at a time, in turns."""
    receiver = Receiver[messages.ToGrammars](endpoint(socket_dir, name), messages.ToGrammars)
    api: Sender[messages.ToApi] = Sender(endpoint(socket_dir, "api"))
    api.send(messages.Ready(role=name))
    waiting: Turns[CompileGrammar] = Turns()
    while True:
        receiver.poll(0.0 if waiting else None)
        for message in receiver.drain():
            if isinstance(message, messages.Ping):
                api.send(messages.Alive(role=name))
            else:
                waiting.add(message.client, message)
        if (request := waiting.take()) is not None:
            api.send(service.compile(request))


def _check(compiler: GrammarCompiler, raw: bytes) -> bytes:
    """Check one grammar, in the bounded process. Returns an encoded GrammarResult."""
    began_s = time.thread_time()
    request = msgspec.msgpack.decode(raw, type=CompileGrammar)
    uid = request.uid
    try:
        checked = compiler.check(request)
        compile_s = time.thread_time() - began_s
        grammar = msgspec.structs.replace(checked, compile_s=compile_s)
        result = GrammarResult(uid=uid, grammar=grammar)
    except InvalidRequest as error:
        result = GrammarResult(uid=uid, error=error.message, limit=error.limit)
    except RecursionError:
        result = GrammarResult(uid=uid, error="the grammar is nested too deeply")
    except MemoryError:  # a limit of the process, which ends
        raise
    # An exception would end the process, and the service with it. The forked process has no thread
    # that writes its log, so its parent logs the traceback.
    except Exception:  # noqa: BLE001
        result = GrammarResult(uid=uid, error=traceback.format_exc(), internal=True)
    return msgspec.msgpack.encode(result)
