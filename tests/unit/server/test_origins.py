"""Host, Origin and Content-Type of a request, with and without keys, on each kind of address."""

import asyncio
from typing import Any

import msgspec
import pytest
from starlette.types import Message, Receive, Scope, Send

from minisgl.server.app import build_app
from minisgl.settings import ServerConfig
from minisgl.settings.keys import key_hashes
from tests.unit.server.fakes import CONFIG, World
from tests.unit.server.test_app import FakeService

Header = tuple[str, str]
LOCAL = ("host", "localhost:1919")
OPEN = CONFIG
KEYED = msgspec.structs.replace(CONFIG, api_key_hashes=key_hashes(["key"], None))
KEY = ("authorization", "Bearer key")


def status(
    *headers: Header,
    config: ServerConfig = OPEN,
    address: str = "127.0.0.1",
    path: str = "/v1/models",
    method: str = "GET",
    body: bytes = b"",
) -> tuple[int, str]:
    """Status and body of the response to one request on a connection to `address`."""
    scope: Scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers],
        "server": (address, 1919),
        "client": ("127.0.0.1", 5),
    }
    sent: list[Message] = []

    async def main() -> None:
        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        app: Any = build_app(FakeService(World(), config))
        arguments: tuple[Scope, Receive, Send] = scope, receive, send
        await app(*arguments)

    asyncio.run(main())
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent).decode()


def code(*headers: Header, **options: Any) -> tuple[int, str | None]:
    found, text = status(*headers, **options)
    error = msgspec.json.decode(text).get("error", {}) if text[:1] == "{" else {}
    return found, error.get("code")


REBOUND = (403, "host_not_allowed")
CROSS = (403, "origin_not_allowed")


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST.:80", "127.0.0.1:1919", "127.8.9.1", "[::1]:1919", "[::1]"],
)
def test_local_names_and_loopback_addresses_are_hosts_of_a_local_server(host: str) -> None:
    assert code(("host", host)) == (200, None)
    assert code(("host", host), address="::1") == (200, None)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:1919",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "[::1",
        "",
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/livez", "/metrics", "/nowhere"])
def test_rebound_name_is_refused_on_a_loopback_address_without_keys(host: str, path: str) -> None:
    assert code(("host", host), path=path) == REBOUND


def test_host_is_free_with_keys_and_on_other_addresses() -> None:
    other = ("host", "api.example")
    assert code(other, KEY, config=KEYED) == (200, None)
    assert code(other, address="10.0.0.7") == (200, None)
    everywhere = msgspec.structs.replace(OPEN, host="0.0.0.0")
    assert code(other, config=everywhere) == (200, None)


def test_allowed_and_own_names_are_hosts() -> None:
    config = msgspec.structs.replace(OPEN, host="box.lan", allowed_hosts=("Proxy.example",))
    assert code(("host", "box.lan:1919"), config=config) == (200, None)
    assert code(("host", "proxy.example"), config=config) == (200, None)
    assert code(("host", "other.example"), config=config) == REBOUND


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "", "http://localhost:3000", "http://localhost"]
)
@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.7"])
def test_pages_of_other_origins_are_refused_without_keys(origin: str, address: str) -> None:
    assert code(LOCAL, ("origin", origin), address=address) == CROSS


def test_own_and_allowed_pages_may_call() -> None:
    assert code(LOCAL, ("origin", "http://localhost:1919")) == (200, None)
    # A proxy that ends TLS.
    headers = ("host", "api.example"), ("origin", "https://api.example")
    assert code(*headers, address="10.0.0.7") == (200, None)
    page = ("origin", "https://a.example")
    for allowed in ("https://a.example", "*"):
        config = msgspec.structs.replace(OPEN, allowed_origins=(allowed,))
        assert code(LOCAL, page, config=config) == (200, None)
    config = msgspec.structs.replace(OPEN, allowed_origins=("https://b.example",))
    assert code(LOCAL, page, config=config) == CROSS
    assert code(LOCAL, page, KEY, config=KEYED) == (200, None)


LENGTH = ("content-length", "2")
NOT_JSON = (415, "unsupported_media_type")


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "",
        "text/plain",
        "text/json",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=application/json",
        "application/jsonp",
        "image/svg+json",
    ],
)
@pytest.mark.parametrize("config", [OPEN, KEYED], ids=["open", "keyed"])
@pytest.mark.parametrize("length", [LENGTH, ("transfer-encoding", "chunked")])
def test_body_that_is_not_json_is_refused_and_the_header_is_named(
    kind: str | None, config: ServerConfig, length: Header
) -> None:
    headers = [LOCAL, KEY, length, *([] if kind is None else [("content-type", kind)])]
    options: dict[str, Any] = {"config": config, "path": "/tokenize", "method": "POST"}
    assert code(*headers, body=b"{}", **options) == NOT_JSON
    assert "Content-Type" in status(*headers, body=b"{}", **options)[1]


@pytest.mark.parametrize(
    "kind",
    ["application/json", "Application/JSON ; charset=utf-8", "application/vnd.api+json"],
)
def test_json_body_reaches_the_route(kind: str) -> None:
    headers = LOCAL, LENGTH, ("content-type", kind)
    assert code(*headers, path="/tokenize", method="POST", body=b"{}")[0] == 400


@pytest.mark.parametrize("length", [[], [("content-length", "0")]])
def test_request_without_a_body_needs_no_content_type(length: list[Header]) -> None:
    assert code(LOCAL, *length) == (200, None)
    admin = msgspec.structs.replace(OPEN, admin_key_hashes=key_hashes(["key"], None))
    options: dict[str, Any] = {"config": admin, "path": "/flush_cache", "method": "POST"}
    assert code(LOCAL, KEY, *length, **options) == (200, None)
