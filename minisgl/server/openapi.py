"""Completes FastAPI's OpenAPI document with the bodies that msgspec decodes and encodes.

FastAPI knows the routes and their descriptions. The schemas come from the structs of `protocol`,
with the bounds and model names of this server, and the errors from the status table.
"""

from typing import Any, NamedTuple

import msgspec

from minisgl.core import TokenizerInfo
from minisgl.protocol import messages_api, requests, responses, responses_api
from minisgl.request.convert import RequestConverter
from minisgl.server.edge.auth import ADMIN_PATHS
from minisgl.server.edge.middleware import OPEN_PATHS
from minisgl.server.errors import is_messages, messages_status, status_table

Schema = dict[str, Any]


class _Bodies(NamedTuple):
    """The structs of one route: its request body, its response body, and an event of its stream."""

    request: type | None = None
    answer: type | None = None
    event: type | None = None


# Routes whose answer is a list of the struct.
_LISTS = frozenset({"/v1/completions/render"})
_STATUS = _Bodies(None, responses.StatusResponse)
_COMPLETION = responses.TextCompletion, responses.TextCompletionChunk
_ROUTES = {
    "/v1/chat/completions": _Bodies(
        requests.ChatBody, responses.ChatCompletion, responses.ChatCompletionChunk
    ),
    "/v1/completions": _Bodies(requests.CompletionBody, *_COMPLETION),
    "/generate": _Bodies(requests.GenerateBody, *_COMPLETION),
    "/v1/responses": _Bodies(
        responses_api.ResponsesBody, responses_api.ModelResponse, responses_api.ResponsesEvent
    ),
    "/v1/responses/input_tokens": _Bodies(responses_api.InputTokensBody, responses_api.InputTokens),
    "/v1/messages": _Bodies(
        messages_api.MessagesBody, messages_api.ModelMessage, messages_api.MessagesEvent
    ),
    "/v1/messages/count_tokens": _Bodies(messages_api.CountTokensBody, messages_api.TokenCount),
    "/v1/chat/completions/render": _Bodies(requests.ChatBody, responses.RenderedPrompt),
    "/v1/completions/render": _Bodies(requests.CompletionBody, responses.RenderedPrompt),
    "/tokenize": _Bodies(requests.TokenizeBody, responses.TokenizeResponse),
    "/detokenize": _Bodies(requests.DetokenizeBody, responses.DetokenizeResponse),
    "/abort": _Bodies(requests.AbortBody, responses.AbortResponse),
    "/flush_cache": _STATUS,
    "/v1/sessions/{session_id}/end": _STATUS,
    "/v1/models": _Bodies(None, responses.ModelList),
    "/v1/models/{model_id}": _Bodies(None, responses.ModelCard),
    "/tokenizer_info": _Bodies(None, TokenizerInfo),
    "/version": _Bodies(None, responses.VersionResponse),
    **dict.fromkeys(("/livez", "/readyz", "/health", "/ping"), _STATUS),
}
# Bounds that the command line sets: field, JSON type, keyword of the schema, name of the limit.
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
        operations.pop("head", None)  # the same as GET, without a body
        scheme = "admin" if path in ADMIN_PATHS else "key" if has_keys else None
        for operation in operations.values():
            operation |= _operation(path)
            if scheme is not None and path not in OPEN_PATHS:
                schemes[scheme] = {"type": "http", "scheme": "bearer"}
                operation["security"] = [{scheme: []}]
    return {
        **base,
        "components": {"schemas": component_schemas(converter), "securitySchemes": schemes},
    }


def component_schemas(converter: RequestConverter) -> dict[str, Schema]:
    """The schema of each body by the name of its struct, with the bounds of this server."""
    structs = {struct for bodies in _ROUTES.values() for struct in bodies if struct is not None}
    errors = {responses.ErrorResponse, messages_api.MessagesError}
    by_name = sorted(structs | errors, key=lambda struct: struct.__name__)
    _, found = msgspec.json.schema_components(by_name, ref_template="#/components/schemas/{name}")
    parameters = requests.PARAMETERS
    for struct in by_name:
        if not issubclass(struct, requests.RequestBody):
            continue
        schema = found[struct.__name__]
        for name, value in schema["properties"].items():
            _configure(name, value, converter)
            if name not in schema["required"] and "null" not in str(value.get("anyOf")):
                schema["properties"][name] = {"anyOf": [value, {"type": "null"}]}
        for base in reversed(struct.__mro__):
            for name, text in parameters.descriptions.get(base.__name__, {}).items():
                schema["properties"][name]["description"] = text
        others = requests.known_parameters(struct)
        schema["properties"] |= {name: {} for name in sorted(others.ignored)}
        neutral = others.unsupported.items()
        schema["properties"] |= {name: {"enum": [*v, None]} for name, v in neutral}
    found["TokenizeBody"]["oneOf"] = [
        {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
        for name in ("prompt", "messages")
    ]
    return found


def _configure(name: str, schema: Schema, converter: RequestConverter) -> None:
    """Add the bound that the command line sets for this field, or the served model names."""
    for option in schema.get("anyOf", [schema]):
        if name == "model" and option["type"] == "string" and converter.served_names:
            option["enum"] = list(converter.served_names)
        kind, keyword, limit = _CONFIGURED.get(name, (None, "", ""))
        if kind is not None and option["type"] == kind:
            option[keyword] = getattr(converter.limits, limit)


def _operation(path: str) -> Schema:
    """Request body and responses of one route."""
    bodies = _ROUTES.get(path, _Bodies())
    answer = _ref(bodies.answer) if bodies.answer else {"type": "object"}
    content = _content({"type": "array", "items": answer} if path in _LISTS else answer)
    if bodies.event is not None:
        done = ", then [DONE]" if issubclass(bodies.event, responses.ResponseHead) else ""
        text = f"Events of {bodies.event.__name__} as JSON{done}."
        content |= _content({"description": text}, "text/event-stream")
    if path == "/metrics":
        content = _content({"type": "string"}, "text/plain", "application/openmetrics-text")
    found: Schema = {"responses": {"200": {"description": "The answer.", "content": content}}}
    if path not in OPEN_PATHS:
        found["responses"] |= _errors(path)
    elif path != "/metrics":
        text = "The server is not ready, or a process hangs or has failed."
        found["responses"] |= {"503": {"description": text, "content": content}}
        found["responses"] |= {"405": _errors(path)["405"]}
    if bodies.request is not None:
        found["requestBody"] = {"required": True, "content": _content(_ref(bodies.request))}
    return found


def _errors(path: str) -> Schema:
    """Each status of the error table, with all its meanings on this path."""
    found: Schema = {}
    for status, _, meaning in status_table():
        content = _content(_ref(responses.ErrorResponse))
        if is_messages(path):
            content, status = _content(_ref(messages_api.MessagesError)), messages_status(status)
        entry = found.setdefault(str(status), {"description": "", "content": content})
        entry["description"] = f"{entry['description']} {meaning}".strip()
    return found


def _ref(struct: type) -> Schema:
    return {"$ref": f"#/components/schemas/{struct.__name__}"}


def _content(schema: Schema, *kinds: str) -> Schema:
    return {kind: {"schema": schema} for kind in kinds or ("application/json",)}
