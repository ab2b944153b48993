"""Errors as clients see them: one table from error class to status, always one nested body."""

import logging
from typing import NamedTuple

import msgspec

from minisgl.core import (
    Cancelled,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    RequestError,
    Unsupported,
)

logger = logging.getLogger(__name__)


class ModelNotFound(RequestError):
    """`model` names none that is served here."""


class RouteNotFound(RequestError):
    """No such path."""


class MethodNotAllowed(RequestError):
    """The path exists, with another method."""


class NotAuthenticated(RequestError):
    """No key, or a wrong one."""


class AdminOnly(RequestError):
    """This path is closed: no admin key is set."""


class HeadTooLarge(RequestError):
    """Request line and headers exceed max_head_bytes."""

    limit = "max_head_bytes"


class RanTooLong(RequestError):
    """The answer took longer than max_total_s; what came so far has been sent if it streams."""


class BodyTooLarge(RequestError):
    """The body exceeds max_body_bytes."""

    limit = "max_body_bytes"


class NotReady(Overloaded):
    """Loading, or draining."""


class EngineFailure(RequestError):
    """This request failed for a reason on our side; trying again would fail again."""


class _Kind(NamedTuple):
    status: int
    type: str
    code: str | None = None


RETRY_AFTER = "1"  # seconds, told with each 503
_INVALID = "invalid_request_error"
_SERVER = "server_error"

# Looked up along the class's ancestry, so that a new error is never without an answer.
_TABLE: dict[type[BaseException], _Kind] = {
    InvalidRequest: _Kind(400, _INVALID),
    PromptTooLong: _Kind(400, _INVALID, "context_length_exceeded"),
    Unsupported: _Kind(400, _INVALID, "unsupported_parameter"),
    ModelNotFound: _Kind(404, _INVALID, "model_not_found"),
    RouteNotFound: _Kind(404, _INVALID, "not_found"),
    MethodNotAllowed: _Kind(405, _INVALID, "method_not_allowed"),
    BodyTooLarge: _Kind(413, _INVALID, "body_too_large"),
    HeadTooLarge: _Kind(431, _INVALID, "head_too_large"),
    NotAuthenticated: _Kind(401, "authentication_error", "invalid_api_key"),
    AdminOnly: _Kind(403, "permission_error", "admin_only"),
    RanTooLong: _Kind(504, _SERVER, "ran_too_long"),
    Overloaded: _Kind(503, _SERVER, "overloaded"),
    NotReady: _Kind(503, _SERVER, "not_ready"),
    DeadlineExceeded: _Kind(503, _SERVER, "deadline_exceeded"),
    Cancelled: _Kind(499, _INVALID, "cancelled"),
    EngineFailure: _Kind(500, _SERVER, "engine_error"),
    EngineError: _Kind(500, _SERVER, "engine_error"),
    BaseException: _Kind(500, _SERVER, "internal_error"),
}


def status_table() -> list[tuple[int, str, str]]:
    """Status, code and the first sentence of each error that a client may see."""
    kinds = [(cls, kind) for cls, kind in _TABLE.items() if issubclass(cls, RequestError)]
    return sorted((k.status, k.code or "", (cls.__doc__ or "").split("\n")[0]) for cls, k in kinds)


class ErrorReply(NamedTuple):
    """Status, extra headers and body (JSON) of an error."""

    status: int
    headers: dict[str, str]
    body: bytes


def error_reply(error: BaseException) -> ErrorReply:
    """What to answer. What is not a RequestError never shows its text to a client.

    A 500 tells clients not to repeat what would fail the same way.
    """
    kind = next(_TABLE[cls] for cls in type(error).__mro__ if cls in _TABLE)
    body: dict[str, str | None] = {"message": "internal error; see the server's log"}
    body |= {"type": kind.type, "param": None, "code": kind.code}
    if isinstance(error, RequestError):
        body |= {"message": error.message, "param": error.param, "code": error.code or kind.code}
    headers: dict[str, str] = {}
    if kind.status == 401:
        headers["www-authenticate"] = "Bearer"
    if kind.status == 503:
        headers["retry-after"] = RETRY_AFTER
    elif kind.status >= 500:
        headers["x-should-retry"] = "false"
    return ErrorReply(kind.status, headers, msgspec.json.encode({"error": body}))
