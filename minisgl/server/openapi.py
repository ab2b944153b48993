"""The OpenAPI document: requests from the validator's own tables, and what comes back."""

from collections.abc import Sequence
from typing import Any

import minisgl
from minisgl.server.auth import ADMIN_PATHS, OPEN_PATHS
from minisgl.server.checks import object_schema
from minisgl.server.params import CHAT, COMPLETIONS, GENERATE, HARMLESS, NOT_OFFERED, ParamTable
from minisgl.server.routes import ABORT, DETOKENIZE, tokenize_check

Schema = dict[str, Any]
_TEXT, _INT, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
_REQUIRED = {CHAT: "messages", COMPLETIONS: "prompt", GENERATE: "input_ids"}
_ERRORS = {
    400: "A parameter is wrong, unknown or not supported, or the prompt is too long.",
    401: "No valid API key.",
    403: "No admin key is set.",
    404: "No such path or model.",
    405: "Another method is needed.",
    413: "The body is too large.",
    431: "Request line and headers are too large.",
    499: "The request was aborted.",
    500: "The engine failed; trying again would fail again.",
    503: "Loading, draining, overloaded, or waited too long; see Retry-After.",
    504: "The answer took too long.",
}


def document(table: ParamTable, models: Sequence[str], has_keys: bool) -> Schema:
    """The whole document of one configured server."""
    model = {"enum": list(models)}

    def of_model(body: Schema) -> Schema:
        value = model if "model" in body.get("required", ()) else _or_null(model)
        return {**body, "properties": {**body["properties"], "model": value}}

    paths = {
        "/v1/chat/completions": _post(
            of_model(request_schema(table, CHAT)), _answer("chat.completion", _MESSAGE), True
        ),
        "/v1/completions": _post(
            of_model(request_schema(table, COMPLETIONS)),
            _answer("text_completion", {"text": _TEXT}),
            True,
        ),
        "/generate": _post(
            of_model(request_schema(table, GENERATE)), _answer("generation", {"text": _TEXT}), True
        ),
        "/tokenize": _post(
            of_model(tokenize_check(table).schema),
            _object(count=_INT, max_model_len=_INT, tokens=_list(_INT)),
        ),
        "/detokenize": _post(of_model(DETOKENIZE.schema), _object(prompt=_TEXT)),
        "/abort": _post(ABORT.schema, _object(aborted=_INT)),
        "/flush_cache": _post(None, _object(status=_TEXT)),
        "/server_info": _get({"type": "object"}),
        "/v1/models": _get(_object(object={"const": "list"}, data=_list(_MODEL))),
        "/v1/models/{model_id}": _get(_MODEL, path_parameter="model_id"),
        **{path: _probe() for path in ("/livez", "/readyz", "/health")},
        "/metrics": {"get": {"responses": _METRICS}},
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
    required = ("model", _REQUIRED[route])
    found = object_schema(properties, required)
    for name in HARMLESS:
        found["properties"].setdefault(name, {})
    for name, neutral in NOT_OFFERED.items():
        found["properties"].setdefault(name, {"enum": [*neutral, None]})
    return found


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_ERROR = _object(
    error=_object(message=_TEXT, type=_TEXT, param=_or_null(_TEXT), code=_or_null(_TEXT))
)
_MODEL = _object(
    id=_TEXT, object={"const": "model"}, created=_INT, owned_by=_TEXT, max_model_len=_or_null(_INT)
)
_USAGE = _object(
    prompt_tokens=_INT,
    completion_tokens=_INT,
    total_tokens=_INT,
    prompt_tokens_details=_object(cached_tokens=_INT),
    completion_tokens_details=_object(reasoning_tokens=_INT),
)
_MESSAGE = {
    "message": _object(role={"const": "assistant"}, content=_TEXT, refusal={"type": "null"})
}
_MESSAGE["message"]["properties"]["reasoning_content"] = _TEXT


_METRICS = {
    "200": {
        "description": "For Prometheus.",
        "content": {
            kind: {"schema": _TEXT} for kind in ("text/plain", "application/openmetrics-text")
        },
    }
}


def _answer(kind: str, content: dict[str, Schema]) -> Schema:
    choice = _object(
        index=_INT,
        **content,
        logprobs=_or_null({"type": "object"}),
        finish_reason={"enum": ["stop", "length"]},
    )
    choice["properties"] |= {"token_ids": _list(_INT), "prompt_token_ids": _list(_INT)}
    return _object(
        id=_TEXT,
        object={"const": kind},
        created=_INT,
        model=_TEXT,
        system_fingerprint=_TEXT,
        choices=_list(choice),
        usage=_USAGE,
    )


def _content(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _responses(answer: Schema, streams: bool = False) -> Schema:
    error = _content({"$ref": "#/components/schemas/Error"})
    good = _content(answer)
    if streams:
        good["text/event-stream"] = {"schema": {}}
    responses = {str(s): {"description": d, "content": error} for s, d in _ERRORS.items()}
    return {"200": {"description": "The answer.", "content": good}, **responses}


def _post(body: Schema | None, answer: Schema, streams: bool = False) -> Schema:
    operation: Schema = {"responses": _responses(answer, streams)}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": _content(body)}
    return {"post": operation}


def _get(answer: Schema, path_parameter: str | None = None) -> Schema:
    operation: Schema = {"responses": _responses(answer)}
    if path_parameter is not None:
        operation["parameters"] = [
            {"name": path_parameter, "in": "path", "required": True, "schema": _TEXT}
        ]
    return {"get": operation}


def _probe() -> Schema:
    state = _content(_object(status=_TEXT))
    responses = {
        "200": {"description": "Yes.", "content": state},
        "503": {"description": "No; the body says why.", "content": state},
        "405": {
            "description": _ERRORS[405],
            "content": _content({"$ref": "#/components/schemas/Error"}),
        },
    }
    return {"get": {"responses": responses}}
