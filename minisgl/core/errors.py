"""The error tree: what can go wrong, named by who has to act on it."""


class MinisglError(Exception):
    """Base of every error that minisgl raises on purpose."""


class ConfigError(MinisglError):
    """Start-up cannot go on; the message is one line for the person who typed the command."""


class RequestError(MinisglError):
    """One request is refused or ended.

    param: the offending field, when there is one. limit: the limit that was exceeded, when that is
    the reason; an error class may always have the same.
    """

    limit: str | None = None

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = None,
        limit: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.limit = limit or type(self).limit


class InvalidRequest(RequestError):
    """A parameter has a wrong type, range or combination."""


class PromptTooLong(RequestError):
    """Prompt, or prompt + max_tokens, exceeds the context length or the whole KV pool."""

    limit = "max_seq_len"


class Unsupported(RequestError):
    """A parameter that minisgl understands but does not offer, and that would change the answer."""


class Overloaded(RequestError):
    """Too much is under way: a queue, connections or bodies. The client may retry."""


class DeadlineExceeded(RequestError):
    """The request waited too long, or still ran when the time for draining was over."""


class Cancelled(RequestError):
    """The client disconnected or aborted the request."""


class EngineError(MinisglError):
    """The process cannot go on."""


class WorkerDied(EngineError):
    """A child process ended although nobody asked it to."""


class OutOfMemory(EngineError):
    """Weights or KV pool do not fit into the device's memory."""


class InvariantBroken(EngineError):
    """An invariant of minisgl itself does not hold. The message ends with: this is a bug."""
