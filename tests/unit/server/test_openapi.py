"""The OpenAPI document describes the requests and answers of the server."""

import asyncio
from typing import Any

import httpx
import msgspec
import pytest

from minisgl.protocol.requests import BODIES, PARAMETERS
from minisgl.request.convert import RequestConverter
from minisgl.server.app import build_app
from minisgl.server.openapi import component_schemas
from minisgl.settings import Limits
from minisgl.settings.keys import key_hashes
from tests.unit.server.fakes import CONFIG, World
from tests.unit.server.test_app import FakeService, call


def served(path: str) -> httpx.Response:
    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(build_app(FakeService(World())))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path)

    return asyncio.run(main())


def references(value: Any) -> set[str]:
    """The target of each $ref in a part of the document."""
    if isinstance(value, dict):
        found = {value["$ref"]} if "$ref" in value else set()
        return found.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


END = "/v1/sessions/{session_id}/end"


def test_document_describes_each_route_and_each_of_its_routes_exists() -> None:
    found = served("/openapi.json").json()
    assert len(found["paths"]) == 24
    for path, operations in found["paths"].items():
        assert served(path).status_code != 404 or "{" in path
        for method, operation in operations.items():
            assert operation["summary"]
            busy = "529" if path.startswith("/v1/messages") else "503"
            assert {"200", busy} <= set(operation["responses"]) or path == "/metrics"
            has_body = method == "post" and path not in ("/flush_cache", END)
            assert ("requestBody" in operation) == has_body


def test_every_reference_of_the_document_has_a_target() -> None:
    found = served("/openapi.json").json()
    schemas = {f"#/components/schemas/{name}" for name in found["components"]["schemas"]}
    assert references(found) <= schemas


@pytest.mark.parametrize("route", BODIES)
def test_request_schema_names_every_parameter(route: str) -> None:
    struct = BODIES[route]
    schema = component_schemas(RequestConverter(CONFIG))[struct.__name__]
    assert set(schema["properties"]) == {
        *struct.__struct_fields__,
        *PARAMETERS.ignored,
        *PARAMETERS.unsupported,
    }
    assert schema["additionalProperties"] is False
    assert "model" in schema["required"]


def test_request_schema_has_the_bounds_and_model_names_of_the_server() -> None:
    limits = Limits(max_messages=5, max_choices=6, max_logprobs=7, max_logit_bias=8)
    config = msgspec.structs.replace(CONFIG, limits=limits)
    properties = component_schemas(RequestConverter(config))["ChatBody"]["properties"]
    assert properties["model"]["enum"] == ["m", "org/m"]
    assert properties["messages"]["maxItems"] == 5
    assert properties["n"]["anyOf"][0]["maximum"] == 6
    assert properties["top_logprobs"]["anyOf"][0]["maximum"] == 7
    assert properties["logprobs"]["anyOf"][0]["type"] == "boolean"
    assert properties["logit_bias"]["anyOf"][0]["maxProperties"] == 8


def test_openapi_requires_a_key_where_the_server_does() -> None:
    config = msgspec.structs.replace(CONFIG, api_key_hashes=key_hashes(["sesame"], None))
    headers = {"authorization": "Bearer sesame"}
    found = call("GET", "/openapi.json", config=config, headers=headers).json()
    assert found["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]
    assert found["paths"]["/abort"]["post"]["security"] == [{"admin": []}]
    assert "security" not in found["paths"]["/livez"]["get"]
    assert set(found["components"]["securitySchemes"]) == {"key", "admin"}
    without_keys = call("GET", "/openapi.json").json()
    assert "security" not in without_keys["paths"]["/v1/models"]["get"]
