"""Maps each error class to an HTTP status, and writes errors in the JSON form of each API.

core/errors.py draws the whole tree. Only the API server raises the classes of this module.
"""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from minisgl import core
from minisgl.protocol.messages_api import MessagesError, MessagesErrorDetail, UnsupportedFeature
from minisgl.protocol.responses import ErrorDetail, ErrorResponse


class RouteNotFound(core.RequestError):
    """The path does not exist."""


class MethodNotAllowed(core.RequestError):
    """The path does not accept this method."""


class RendersOnly(core.RequestError):
    """The path needs an engine, and the server runs with --render-only."""


class NotAuthenticated(core.RequestError):
    """The API key is missing or wrong."""


class AdminOnly(core.RequestError):
    """The path needs a server with an admin key."""


class ForbiddenHost(core.RequestError):
    """The Host header is not a name of this server; checked on loopback addresses without keys."""


class ForbiddenOrigin(core.RequestError):
    """The Origin header names another web site; checked on servers without keys."""


class UnsupportedMediaType(core.RequestError):
    """The request has a body, and its Content-Type is not JSON."""


class HeadTooLarge(core.RequestError):
    """Request line and headers exceed max_head_bytes or max_headers."""

    limit = "max_head_bytes"


class RanTooLong(core.RequestError):
    """The answer took longer than max_total_s. A stream has sent the text up to then."""


class BodyTooLarge(core.RequestError):
    """The body exceeds max_body_bytes."""

    limit = "max_body_bytes"


class NotReady(core.Overloaded):
    """The server is loading or draining."""


class _Kind(NamedTuple):
    status: int
    type: str
    code: str | None = None


RETRY_AFTER = "1"  # seconds, in the header of each 503 and 529
MESSAGES_PATH = "/v1/messages"  # errors on this path and below have the form of Anthropic's API
_INVALID = "invalid_request_error"
_SERVER = "server_error"

# An error class without an entry has the entry of its nearest base class.
_TABLE: Mapping[type[BaseException], _Kind] = {
    core.InvalidRequest: _Kind(400, _INVALID),
    core.ImageRefused: _Kind(400, _INVALID, "image_refused"),
    core.PromptTooLong: _Kind(400, _INVALID, "context_length_exceeded"),
    core.Unsupported: _Kind(400, _INVALID, "unsupported_parameter"),
    core.GrammarFailed: _Kind(400, _INVALID, "grammar_failed"),
    core.ModelNotFound: _Kind(404, _INVALID, "model_not_found"),
    RouteNotFound: _Kind(404, _INVALID, "not_found"),
    MethodNotAllowed: _Kind(405, _INVALID, "method_not_allowed"),
    BodyTooLarge: _Kind(413, _INVALID, "body_too_large"),
    UnsupportedMediaType: _Kind(415, _INVALID, "unsupported_media_type"),
    HeadTooLarge: _Kind(431, _INVALID, "head_too_large"),
    NotAuthenticated: _Kind(401, "authentication_error", "invalid_api_key"),
    AdminOnly: _Kind(403, "permission_error", "admin_only"),
    ForbiddenHost: _Kind(403, "permission_error", "host_not_allowed"),
    ForbiddenOrigin: _Kind(403, "permission_error", "origin_not_allowed"),
    RendersOnly: _Kind(501, _INVALID, "renders_only"),
    RanTooLong: _Kind(504, _SERVER, "ran_too_long"),
    core.Overloaded: _Kind(503, _SERVER, "overloaded"),
    NotReady: _Kind(503, _SERVER, "not_ready"),
    core.DeadlineExceeded: _Kind(503, _SERVER, "deadline_exceeded"),
    core.Cancelled: _Kind(499, _INVALID, "cancelled"),
    core.EngineFailure: _Kind(500, _SERVER, "engine_error"),
    core.EngineError: _Kind(500, _SERVER, "engine_error"),
    BaseException: _Kind(500, _SERVER, "internal_error"),
}

# The type of an error on the paths of Messages, by its status there.
_MESSAGES_TYPES: Mapping[int, str] = {
    **dict.fromkeys((400, 405, 415, 431), _INVALID),
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    504: "timeout_error",
    529: "overloaded_error",
}


def status_table() -> list[tuple[int, str, str]]:
    """Status, code and docstring of each error that a client may receive."""
    kinds = [(cls, kind) for cls, kind in _TABLE.items() if issubclass(cls, core.RequestError)]
    return sorted((k.status, k.code or "", (cls.__doc__ or "").split("\n")[0]) for cls, k in kinds)


class ErrorReply(NamedTuple):
    """Status, extra headers and JSON body of an error response."""

    status: int
    headers: dict[str, str]
    body: bytes


def public_message(error: BaseException) -> str:
    """The message for the client. Clients see the message of a RequestError only."""
    if isinstance(error, core.RequestError):
        return error.message
    return "internal error; see the server's log"


def messages_status(status: int) -> int:
    """Return the status on the paths of Messages, where 529 replaces 503."""
    return 529 if status == 503 else status


def messages_error(error: BaseException) -> MessagesError:
    """An error in the form of Anthropic's API.

    The tool runners of Anthropic's SDKs send `thread`. They repeat a request without it if the
    error has these details.
    """
    kind = _MESSAGES_TYPES.get(messages_status(_kind(error).status), "api_error")
    detail = MessagesErrorDetail(kind, public_message(error))
    if isinstance(error, core.Unsupported) and error.param == "thread":
        detail.details = UnsupportedFeature(unsupported=("thread",))
    return MessagesError(error=detail)


def is_messages(path: str) -> bool:
    """True for the paths of Anthropic's API."""
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


def _kind(error: BaseException) -> _Kind:
    return next(_TABLE[cls] for cls in type(error).__mro__ if cls in _TABLE)


def error_reply(error: BaseException, path: str = "") -> ErrorReply:
    """The response to an error of a request to this path.

    A 503 says when to retry. Other errors of the server ask the clients not to retry.
    """
    kind = _kind(error)
    headers: dict[str, str] = {}
    if kind.status == 401:
        headers["www-authenticate"] = "Bearer"
    if kind.status == 503:
        headers["retry-after"] = RETRY_AFTER
    elif kind.status >= 500:
        headers["x-should-retry"] = "false"
    if is_messages(path):
        body = msgspec.json.encode(messages_error(error))
        return ErrorReply(messages_status(kind.status), headers, body)
    detail = ErrorDetail(public_message(error), kind.type, None, kind.code)
    if isinstance(error, core.RequestError):
        detail.param, detail.code = error.param, error.code or kind.code
    return ErrorReply(kind.status, headers, msgspec.json.encode(ErrorResponse(detail)))
