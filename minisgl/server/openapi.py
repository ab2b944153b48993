"""Completes FastAPI's OpenAPI document with the bodies that msgspec decodes and encodes.

FastAPI knows the routes and their descriptions. The schemas come from the structs of `protocol`,
with the bounds and model names of this server, and the errors from the status table.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from minisgl.server.auth import ADMIN_PATHS
from minisgl.server.convert import RequestConverter
from minisgl.server.errors import status_table
from minisgl.server.middleware import OPEN_PATHS
from minisgl.server.protocol import requests, responses
from minisgl.server.protocol.requests import BODIES, IGNORED, UNSUPPORTED

Schema = dict[str, Any]

# The structs of each route's request, response and stream events.
_GENERATION_ROUTES = {
    "/v1/chat/completions": (
        requests.ChatBody,
        responses.ChatCompletion,
        responses.ChatCompletionChunk,
    ),
    "/v1/completions": (
        requests.CompletionBody,
        responses.Completion,
        responses.CompletionChunk,
    ),
    "/generate": (requests.GenerateBody, responses.Completion, responses.CompletionChunk),
}
_OTHER_ROUTES: dict[str, tuple[type | None, type | None]] = {
    "/tokenize": (requests.TokenizeBody, responses.TokenizeResponse),
    "/detokenize": (requests.DetokenizeBody, responses.DetokenizeResponse),
    "/abort": (requests.AbortBody, responses.AbortResponse),
    "/flush_cache": (None, responses.StatusResponse),
    "/server_info": (None, None),
    "/v1/models": (None, responses.ModelList),
    "/v1/models/{model_id}": (None, responses.ModelCard),
}
_PROBES = ("/livez", "/readyz", "/health")
# Fields whose bound the command line sets: the type that it bounds, the keyword, the limit.
_CONFIGURED = {
    "messages": ("array", "maxItems", "max_messages"),
    "n": ("integer", "maximum", "max_choices"),
    "logprobs": ("integer", "maximum", "max_logprobs"),
    "top_logprobs": ("integer", "maximum", "max_logprobs"),
    "logit_bias": ("object", "maxProperties", "max_logit_bias"),
}


def openapi_document(base: Schema, converter: RequestConverter, has_keys: bool) -> Schema:
    """The document of one configured server. base: FastAPI's document, which is changed in place.

    has_keys: the server asks for API keys.
    """
    schemes: Schema = {}
    for path, operations in base["paths"].items():
        operations.pop("head", None)  # as GET, without a body
        for operation in operations.values():
            operation |= _bodies(path)
            scheme = "admin" if path in ADMIN_PATHS else "key" if has_keys else None
            if scheme is not None and path not in OPEN_PATHS:
                schemes[scheme] = {"type": "http", "scheme": "bearer"}
                operation["security"] = [{scheme: []}]
    schemas = component_schemas(converter)
    return {**base, "components": {"schemas": schemas, "securitySchemes": schemes}}


def component_schemas(converter: RequestConverter) -> dict[str, Schema]:
    """The schema of each body by the name of its struct, with the bounds of this server."""
    routes = [*_GENERATION_ROUTES.values(), *_OTHER_ROUTES.values()]
    structs = {struct for route in routes for struct in route if struct is not None}
    structs |= {responses.ErrorResponse, responses.StatusResponse}
    by_name = sorted(structs, key=lambda struct: struct.__name__)
    _, found = msgspec.json.schema_components(by_name, ref_template="#/components/schemas/{name}")
    others = {name: {"enum": [*neutral, None]} for name, neutral in UNSUPPORTED.items()}
    for struct in BODIES.values():
        schema = found[struct.__name__]
        schema["properties"] |= {name: {} for name in sorted(IGNORED)} | others
    for schema in found.values():
        if schema.get("additionalProperties") is False:
            _add_configuration(schema["properties"], converter)
    # A schema cannot say that null is absent, so each arm also refuses null.
    found["TokenizeBody"]["oneOf"] = [
        {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
        for name in ("prompt", "messages")
    ]
    return found


def _add_configuration(properties: Schema, converter: RequestConverter) -> None:
    for name, (kind, keyword, limit) in _CONFIGURED.items():
        for arm in _arms(properties.get(name, {})):
            if arm.get("type") == kind:
                arm[keyword] = getattr(converter.limits, limit)
    if converter.served_names:
        for arm in _arms(properties.get("model", {})):
            if arm.get("type") == "string":
                arm["enum"] = list(converter.served_names)


def _arms(schema: Schema) -> Sequence[Schema]:
    arms: list[Schema] = schema.get("anyOf", [schema])
    return arms


def _bodies(path: str) -> Schema:
    """Request body, parameters and responses of one route."""
    if path in _PROBES:
        state = _content(_ref(responses.StatusResponse))
        refused = {"description": "The server is not ready or not alive.", "content": state}
        return {
            "responses": {
                "200": {"description": "The probe succeeds.", "content": state},
                "405": _errors()["405"],
                "503": refused,
            }
        }
    if path == "/metrics":
        kinds = ("text/plain", "application/openmetrics-text")
        text = _content({"type": "string"}, *kinds)
        return {"responses": {"200": {"description": "All metrics.", "content": text}}}
    if path in _GENERATION_ROUTES:
        request, response, chunk = _GENERATION_ROUTES[path]
        stream = {"description": f"Events of {chunk.__name__} as JSON, then [DONE]."}
        content = _content(_ref(response)) | _content(stream, "text/event-stream")
        return _operation(request, content)
    body, answer = _OTHER_ROUTES[path]
    found = _operation(body, _content({"type": "object"} if answer is None else _ref(answer)))
    if "{model_id}" in path:
        name = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}
        found["parameters"] = [name]
    return found


def _operation(body: type | None, content: Schema) -> Schema:
    good = {"description": "The answer.", "content": content}
    found: Schema = {"responses": {"200": good, **_errors()}}
    if body is not None:
        found["requestBody"] = {"required": True, "content": _content(_ref(body))}
    return found


def _errors() -> Schema:
    """Each status of the error table, with all its meanings."""
    meanings: dict[int, list[str]] = {}
    for status, _, meaning in status_table():
        meanings.setdefault(status, []).append(meaning)
    content = _content(_ref(responses.ErrorResponse))
    return {
        str(status): {"description": " ".join(texts), "content": content}
        for status, texts in meanings.items()
    }


def _ref(struct: type) -> Schema:
    return {"$ref": f"#/components/schemas/{struct.__name__}"}


def _content(schema: Schema, *kinds: str) -> Schema:
    return {kind: {"schema": schema} for kind in kinds or ("application/json",)}
