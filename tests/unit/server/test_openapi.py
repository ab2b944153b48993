"""The document is the validator's own account of itself."""

import asyncio
import json
from typing import Any

import httpx
import msgspec
import pytest

from minisgl.server import Limits
from minisgl.server.app import build_app
from minisgl.server.openapi import document, request_schema
from minisgl.server.params import CHAT, COMPLETIONS, GENERATE, HARMLESS, NOT_OFFERED, ParamTable
from tests.unit.server.fakes import CONFIG, World
from tests.unit.server.test_app import FakeService

TABLE = ParamTable(Limits())


def served(path: str) -> httpx.Response:
    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(build_app(FakeService(World())))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path)

    return asyncio.run(main())


def test_document_describes_each_route_and_each_of_its_routes_exists() -> None:
    found = served("/openapi.json").json()
    table = ParamTable(Limits(), CONFIG.served_names)
    described = json.loads(msgspec.json.encode(document(table, False)))
    assert found["components"] == described["components"]
    assert found["paths"].keys() == described["paths"].keys()
    for path, operations in found["paths"].items():
        assert served(path).status_code != 404 or "{" in path
        assert operations.keys() == described["paths"][path].keys()
        for method, operation in operations.items():
            assert operation["summary"]
            assert operation.items() >= described["paths"][path][method].items()
            assert {"200", "503"} <= set(operation["responses"]) or path == "/metrics"


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, GENERATE])
def test_request_schema_names_every_parameter(route: str) -> None:
    schema: dict[str, Any] = request_schema(TABLE, route)
    names = set(schema["properties"])
    assert names == {*TABLE.offered[route], *HARMLESS, *NOT_OFFERED}
    assert schema["additionalProperties"] is False


def test_keys_are_asked_for_where_they_are_needed() -> None:
    secured = document(TABLE, has_keys=True)["paths"]
    assert secured["/v1/models"]["get"]["security"] == [{"key": []}]
    assert secured["/abort"]["post"]["security"] == [{"admin": []}]
    assert "security" not in secured["/livez"]["get"]
