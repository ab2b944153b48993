"""Keys: valid ones, closed paths, and the form of the refusals."""

import asyncio
from pathlib import Path

import httpx
import msgspec
import pytest

from minisgl.core import ConfigError
from minisgl.server.app import build_app
from minisgl.server.edge.auth import ADMIN_PATHS
from minisgl.server.edge.middleware import OPEN_PATHS
from minisgl.settings import ServerConfig
from minisgl.settings.keys import key_hashes
from tests.unit.server.fakes import CONFIG, World
from tests.unit.server.test_app import FakeService

KEYED = msgspec.structs.replace(
    CONFIG,
    api_key_hashes=key_hashes(["användare", "second", "voilà"], None),
    admin_key_hashes=key_hashes(["root"], None),
)


def get(path: str, key: str | bytes | None, config: ServerConfig = KEYED, **more: str):
    raw = key.encode() if isinstance(key, str) else key
    headers = {**more} if raw is None else {**more, "authorization": b"Bearer " + raw}

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(build_app(FakeService(World(), config)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(main())


@pytest.mark.parametrize("key", ["användare", "second", "voilà", "root", " second  "])
def test_each_key_opens_the_models(key: str) -> None:
    """Regression: the last byte of an à in UTF-8 is a space in latin-1, and was stripped."""
    assert get("/v1/models", key).status_code == 200


@pytest.mark.parametrize("key", [None, "", "x", "secon", "second2", b"\xff\xfe", "a" * 5000])
@pytest.mark.parametrize("path", ["/v1/models", "/openapi.json", "/nowhere", "/server_info"])
def test_wrong_key_is_refused_on_every_path(path: str, key: str | bytes | None) -> None:
    answer = get(path, key)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["x-request-id"]
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_probes_need_no_key() -> None:
    for path in OPEN_PATHS:
        assert get(path, None).status_code in (200, 404)


def test_admin_routes_are_closed_without_an_admin_key_and_to_other_keys() -> None:
    for path in ADMIN_PATHS:
        assert get(path, "second").status_code == 401
        assert get(path, None, CONFIG).status_code == 403
    assert get("/server_info", "root").status_code == 200


@pytest.mark.parametrize("end", ["%0A", "%0D%0A", "%00", "%20", "/", ";", "%2F", "%3F", "#%0A"])
@pytest.mark.parametrize("path", sorted(ADMIN_PATHS))
def test_other_spellings_of_an_admin_path_are_closed(path: str, end: str) -> None:
    """Regression: the router took /abort%0A for /abort, and the keys took it for an open path."""
    for config in (KEYED, CONFIG):
        assert get(path + end, "second", config).status_code in (401, 403, 404)


def test_forged_host_header_opens_no_path() -> None:
    """CVE-2026-48710: a path made from headers differs from the path that is routed."""
    for host in ("x/livez?", "x/health#", "/livez"):
        assert get("/v1/models", None, host=host).status_code == 401


def test_server_info_contains_no_path_and_no_key() -> None:
    text = get("/server_info", "root").text
    assert '"kv_dtype":"float32"' in text
    assert "model_path" not in text
    assert "hash" not in text


def test_key_files_are_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one\n\n two \n")
    assert key_hashes([], str(path)) == key_hashes(["one", " two\n"], None)
    path.write_text("\n")
    for keys, file in (([""], None), ([], str(path)), ([], str(tmp_path / "none"))):
        with pytest.raises(ConfigError):
            key_hashes(keys, file)


def test_cross_origin_calls_are_off_unless_allowed() -> None:
    origin = {"origin": "https://a.example"}
    name = "access-control-allow-origin"
    assert name not in get("/v1/models", None, CONFIG, **origin).headers
    config = msgspec.structs.replace(CONFIG, allowed_origins=("https://a.example",))
    assert get("/v1/models", None, config, **origin).headers[name] == "https://a.example"
    other = {"origin": "https://b.example"}
    assert name not in get("/v1/models", None, config, **other).headers
