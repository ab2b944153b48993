"""The status of each error class, and the drawing of the tree."""

import json
import re

import pytest

from minisgl.core import (
    EngineError,
    EngineFailure,
    InvalidRequest,
    MinisglError,
    Overloaded,
    PromptTooLong,
    RequestError,
    Unsupported,
    errors,
)
from minisgl.server import errors as server_errors
from minisgl.server.errors import NotReady, error_reply


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequest("m", param="p"), 400, None),
        (InvalidRequest("m", code="unknown_parameter"), 400, "unknown_parameter"),
        (PromptTooLong("m"), 400, "context_length_exceeded"),
        (Unsupported("m"), 400, "unsupported_parameter"),
        (Overloaded("m"), 503, "overloaded"),
        (NotReady("m"), 503, "not_ready"),
        (EngineFailure("m"), 500, "engine_error"),
        (ValueError("secret /path"), 500, "internal_error"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_status_and_code(error: Exception, status: int, code: str | None) -> None:
    reply = error_reply(error)
    assert reply.status == status
    assert json.loads(reply.body)["error"]["code"] == code


def test_every_error_of_the_tree_has_an_answer() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert MinisglError in kinds
    for kind in kinds:
        assert issubclass(kind, MinisglError)
        assert 400 <= error_reply(kind("m")).status < 600


def test_documented_error_tree_names_every_error_class() -> None:
    def children(kind: type[Exception]) -> list[str]:
        below = [one for one in kind.__subclasses__() if one.__module__ in modules]
        return [kind.__name__, *(name for one in below for name in children(one))]

    modules = {errors.__name__, server_errors.__name__}
    drawn = re.findall(r"^ +(?:- )?(\w+)(?: {2,}.*)?$", errors.__doc__ or "", re.MULTILINE)
    assert sorted(drawn) == sorted(children(MinisglError))


def test_a_thread_is_refused_as_the_tool_runners_of_anthropic_expect() -> None:
    """They repeat the request without `thread` only if the error has these details."""
    error = Unsupported("thread is not supported", param="thread")
    found = json.loads(error_reply(error, "/v1/messages").body)
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert found["error"]["details"] == details
    assert "details" not in json.loads(error_reply(error, "/v1/responses").body)["error"]
    other = Unsupported("x is not supported", param="x")
    assert "details" not in json.loads(error_reply(other, "/v1/messages").body)["error"]


def test_only_request_errors_show_their_text() -> None:
    assert "secret" not in error_reply(ValueError("secret")).body.decode()
    assert "secret" not in error_reply(EngineError("secret")).body.decode()


def test_retry_headers() -> None:
    assert error_reply(Overloaded("m")).headers == {"retry-after": "1"}
    assert error_reply(NotReady("m")).headers == {"retry-after": "1"}
    assert error_reply(RequestError("m")).headers == {"x-should-retry": "false"}
    assert error_reply(InvalidRequest("m")).headers == {}
