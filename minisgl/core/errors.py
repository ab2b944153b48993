"""The errors that minisgl raises on purpose.

    MinisglError
      - ConfigError               the start cannot continue
      - RequestError              one request is refused or ended
        - InvalidRequest
          - ImageRefused
        - PromptTooLong
        - Unsupported
        - GrammarFailed
        - Overloaded
          - NotReady              (server)
        - DeadlineExceeded
        - Cancelled
        - ModelNotFound
        - RouteNotFound           (server)
        - MethodNotAllowed        (server)
        - RendersOnly             (server)
        - NotAuthenticated        (server)
        - AdminOnly               (server)
        - ForbiddenHost           (server)
        - ForbiddenOrigin         (server)
        - UnsupportedMediaType    (server)
        - HeadTooLarge            (server)
        - BodyTooLarge            (server)
        - RanTooLong              (server)
        - EngineFailure
      - EngineError               the process cannot continue
        - WorkerDied
        - OutOfMemory
        - InvariantBroken

The classes marked (server) are in server/errors.py, with the HTTP status of each RequestError.
A message names the fault, the expected value and the remedy.
"""


class MinisglError(Exception):
    """Base class of all errors that minisgl raises on purpose."""


class ConfigError(MinisglError):
    """The start cannot continue. The message is one line for the user who ran the command."""


class RequestError(MinisglError):
    """One request is refused or ended.

    message  for the client.
    param    the name of the parameter that is wrong, if there is one.
    code     replaces the code of the class in the response.
    limit    the name of the limit that the request exceeded, if that is the reason. A class may
             set it for all of its errors.
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
    """A parameter has a wrong type, is out of its range, or conflicts with another parameter."""


class ImageRefused(InvalidRequest):
    """An image is not accepted.

    reason: source, model, count, format, size, cost or broken: a label of a metric.
    """

    def __init__(
        self,
        message: str,
        reason: str = "broken",
        param: str | None = None,
        limit: str | None = None,
    ) -> None:
        super().__init__(message, param, limit=limit)
        self.reason = reason


class PromptTooLong(RequestError):
    """Prompt, or prompt + max_tokens, exceeds the context length or the whole KV pool."""

    limit = "max_seq_len"


class Unsupported(RequestError):
    """The request sets a parameter that minisgl knows but does not support.

    An answer that ignores the parameter would be wrong.
    """


class GrammarFailed(RequestError):
    """The request's grammar is too complex, or it allows no next token."""


class Overloaded(RequestError):
    """The queue, the connections or the bytes of requests reach a limit. A client may retry."""


class DeadlineExceeded(RequestError):
    """The request waited too long, or still ran at the end of a drain."""


class Cancelled(RequestError):
    """The client disconnected or aborted the request."""


class ModelNotFound(RequestError):
    """`model` is not the name of a served model."""


class EngineFailure(RequestError):
    """The server failed to serve the request. It asks clients not to retry."""


class EngineError(MinisglError):
    """The process cannot continue."""


class WorkerDied(EngineError):
    """A child process ended although its parent had not stopped it."""


class OutOfMemory(EngineError):
    """Weights or KV pool do not fit into the memory of the device."""


class InvariantBroken(EngineError):
    """An invariant of minisgl itself does not hold. The message ends with: this is a bug."""
