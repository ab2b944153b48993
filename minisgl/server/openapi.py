"""The OpenAPI document: requests from the validator's own tables, and what comes back."""

from typing import Any

import minisgl
from minisgl.server.auth import ADMIN_PATHS
from minisgl.server.checks import Schema, object_schema
from minisgl.server.errors import status_table
from minisgl.server.middleware import OPEN_PATHS
from minisgl.server.params import (
    ABORT,
    CHAT,
    COMPLETIONS,
    GENERATE,
    HARMLESS,
    NOT_OFFERED,
    ParamTable,
)

_TEXT, _INT = {"type": "string"}, {"type": "integer"}
_REQUIRED = {CHAT: "messages", COMPLETIONS: "prompt", GENERATE: "input_ids"}


def document(table: ParamTable, has_keys: bool) -> Schema:
    """The whole document of one configured server."""
    paths = {
        "/v1/chat/completions": _stream(table, CHAT, "chat.completion", _MESSAGE),
        "/v1/completions": _stream(table, COMPLETIONS, "text_completion", {"text": _TEXT}),
        "/generate": _stream(table, GENERATE, "generation", {"text": _TEXT}),
        "/tokenize": _post(
            table.tokenize.schema,
            _object(count=_INT, max_model_len=_INT, tokens=_list(_INT)),
        ),
        "/detokenize": _post(table.detokenize.schema, _object(prompt=_TEXT)),
        "/abort": _post(ABORT.schema, _object(aborted=_INT)),
        "/flush_cache": {"post": _operation(_object(status=_TEXT))},
        "/server_info": {"get": _operation({"type": "object"})},
        "/v1/models": {"get": _operation(_object(object={"const": "list"}, data=_list(_MODEL)))},
        "/v1/models/{model_id}": {"get": {**_operation(_MODEL), "parameters": [_MODEL_ID]}},
        **{path: {"get": {"responses": _PROBE}} for path in ("/livez", "/readyz", "/health")},
        "/metrics": {"get": {"responses": {"200": _METRICS}}},
    }
    schemes: Schema = {}
    for path, operations in paths.items():
        scheme = "admin" if path in ADMIN_PATHS else "key" if has_keys else None
        if scheme is not None and path not in OPEN_PATHS:
            schemes[scheme] = {"type": "http", "scheme": "bearer"}
            for operation in operations.values():
                operation["security"] = [{scheme: []}]
    return {
        "openapi": "3.1.0",
        "info": {"title": "minisgl", "version": minisgl.__version__},
        "paths": paths,
        "components": {"schemas": {"Error": _ERROR}, "securitySchemes": schemes},
    }


def request_schema(table: ParamTable, route: str) -> Schema:
    """What `table.validate` and the readers behind it accept, as far as a schema can say it."""
    properties = {name: check.schema for name, check in table.offered[route].items()}
    found = object_schema(properties, ("model", _REQUIRED[route]))
    others = {name: {"enum": [*neutral, None]} for name, neutral in NOT_OFFERED.items()}
    found["properties"] = {name: {} for name in HARMLESS} | others | found["properties"]
    return found


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _answer(kind: str, content: dict[str, Schema]) -> Schema:
    finish = {"enum": ["stop", "length"]}
    logprobs = _or_null({"type": "object"})
    choice = _object(index=_INT, **content, logprobs=logprobs, finish_reason=finish)
    choice["properties"] |= {"token_ids": _list(_INT), "prompt_token_ids": _list(_INT)}
    head = {"id": _TEXT, "object": {"const": kind}, "created": _INT, "model": _TEXT}
    return _object(**head, system_fingerprint=_TEXT, choices=_list(choice), usage=_USAGE)


def _content(schema: Schema, *kinds: str) -> Schema:
    return {kind: {"schema": schema} for kind in kinds or ("application/json",)}


def _operation(answer: Schema) -> Schema:
    good = {"description": "The answer.", "content": _content(answer)}
    return {"responses": {"200": good, **_REFUSALS}}


def _post(body: Schema, answer: Schema) -> Schema:
    given = {"required": True, "content": _content(body)}
    return {"post": {"requestBody": given, **_operation(answer)}}


def _stream(table: ParamTable, route: str, kind: str, content: dict[str, Schema]) -> Schema:
    found = _post(request_schema(table, route), _answer(kind, content))
    found["post"]["responses"]["200"]["content"] |= _content({}, "text/event-stream")
    return found


def _refusals() -> Schema:
    """Each status, with all that it may mean."""
    meanings: dict[int, list[str]] = {}
    for status, _, meaning in status_table():
        meanings.setdefault(status, []).append(meaning)
    content = _content({"$ref": "#/components/schemas/Error"})
    return {
        str(status): {"description": " ".join(texts), "content": content}
        for status, texts in meanings.items()
    }


_REFUSALS = _refusals()
_ERROR = _object(
    error=_object(message=_TEXT, type=_TEXT, param=_or_null(_TEXT), code=_or_null(_TEXT))
)
_MODEL = _object(
    id=_TEXT, object={"const": "model"}, created=_INT, owned_by=_TEXT, max_model_len=_or_null(_INT)
)
_MODEL_ID = {"name": "model_id", "in": "path", "required": True, "schema": _TEXT}
_USAGE = _object(
    prompt_tokens=_INT,
    completion_tokens=_INT,
    total_tokens=_INT,
    prompt_tokens_details=_object(cached_tokens=_INT),
    completion_tokens_details=_object(reasoning_tokens=_INT),
)
_MESSAGE: dict[str, Any] = {
    "message": _object(role={"const": "assistant"}, content=_TEXT, refusal={"type": "null"})
}
_MESSAGE["message"]["properties"]["reasoning_content"] = _TEXT
_STATE = _content(_object(status=_TEXT))
_PROBE = {
    "200": {"description": "Yes.", "content": _STATE},
    "405": _REFUSALS["405"],
    "503": {"description": "No; the body says why.", "content": _STATE},
}
_METRICS = {
    "description": "For Prometheus.",
    "content": _content(_TEXT, "text/plain", "application/openmetrics-text"),
}
