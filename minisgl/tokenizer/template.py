"""`ChatTemplate`: loads and renders a chat template in a bounded process."""

import json
import signal
from typing import Any

import msgspec

from minisgl.tokenizer.renderer import RenderResult, TemplateError, TemplateRenderer
from minisgl.utils.bounded import BoundedProcess, Bounds
from minisgl.utils.supervise import describe_exit

MAX_TEMPLATE_CHARS = 8 * 2**20  # The server's limit for the rendered text of one chat.
TIMEOUT_S = 5.0
_MEMORY_BYTES = 2**29
_NAME = "the process for the chat template"


class ChatTemplate:
    """The chat template of a model, in a process of its own.

    A template computes with Python's operators. One operation, such as a comparison of nested
    lists, can take hours, and no signal interrupts it. Another can take all memory. Jinja computes
    constants while it loads a template.

    variables: the names of the variables that the template reads.
    """

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        max_chars: float,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Load the template. Raises TemplateError if this fails or exceeds a limit.

        max_chars: the limit for the length of a rendered chat.
        timeout_s: the limit for the CPU time of loading, and of rendering one chat.
        """
        self._source = source
        self._special_tokens = special_tokens
        self._timeout_s = timeout_s
        renderer = TemplateRenderer(source, special_tokens, max_chars)
        self._process = BoundedProcess(_NAME, renderer.handle, Bounds(timeout_s, _MEMORY_BYTES))
        try:
            self.variables = self._call(b"").variables
        except BaseException:
            self.close()
            raise

    @property
    def standalone(self) -> str:
        """The source, after definitions of the variables that `render` provides.

        Another program can render this text with the messages only.
        """
        given = {"tools": None, "documents": None, **self._special_tokens}
        texts = {n: "none" if v is None else json.dumps(v) for n, v in given.items()}
        sets = [
            f"{{% set {name} = {name} | default({text}) %}}"
            for name, text in texts.items()
            if name in self.variables
        ]
        return "".join(sets) + self._source

    def render(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
        """The prompt text of a chat. Raises TemplateError for every failure of the template.

        With the option continue_final_message, the prompt ends with the content of the last
        message, so that the model continues it.
        """
        try:
            request = json.dumps([messages, options], ensure_ascii=False)
        except (TypeError, ValueError) as error:
            message = f"messages and template options must be JSON values: {error}"
            raise TemplateError(message) from None
        return self._call(request.encode("utf-8", "surrogatepass")).text.decode(
            "utf-8", "surrogatepass"
        )

    def close(self) -> None:
        """End the process. A second call does nothing."""
        self._process.close()

    def _call(self, request: bytes) -> RenderResult:
        reply = self._process.call(request)
        if isinstance(reply, signal.Signals):
            raise self._ended(reply)
        result = msgspec.msgpack.decode(reply, type=RenderResult)
        if result.bug is not None:
            raise RuntimeError(f"the chat template failed:\n{result.bug}")
        if result.error is not None:
            raise TemplateError(result.error, result.limit)
        return result

    def _ended(self, by: signal.Signals) -> Exception:
        """The error of a call that this signal has ended."""
        match by:
            case signal.SIGPROF:
                message = f"the chat template ran longer than {self._timeout_s:g} s"
                return TemplateError(message, "template_timeout_s")
            case signal.SIGABRT:
                message = f"the chat template took more than {_MEMORY_BYTES >> 20} MiB of memory"
                return TemplateError(message)
            case signal.SIGSEGV:
                return TemplateError("the chat template exceeded the stack of its process")
        # The cause is not the chat, for example a machine without memory.
        return ChildProcessError(f"{_NAME} {describe_exit(-by)}")
