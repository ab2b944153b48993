"""Sessions of clients, from the headers and bodies of requests to the scheduler."""

import asyncio
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from minisgl.message.messages import AddReq
from minisgl.server.app import build_app
from tests.unit.server.fakes import World
from tests.unit.server.test_app import FakeService, answer_all

NAMES = ("s1", "a/b", "Grüße")
REQUESTS: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("/v1/messages", {"max_tokens": 2}, {"x-claude-code-session-id": "{}"}),
    ("/v1/responses", {"input": "a", "prompt_cache_key": "{}"}, {}),
    ("/v1/chat/completions", {"prompt_cache_key": "{}"}, {}),
    ("/v1/chat/completions", {"session_id": "{}"}, {}),
    ("/v1/chat/completions", {"session_id": "s2"}, {"session_id": "{}"}),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("path", "fields", "headers"), REQUESTS)
def test_the_end_of_a_session_has_the_key_of_its_requests(
    path: str, fields: dict[str, Any], headers: dict[str, str], name: str
) -> None:
    """The name is UTF-8 in headers, bodies and paths. A slash of it may be quoted in the path."""

    async def main() -> list[Any]:
        world = World()
        transport = httpx.ASGITransport(build_app(FakeService(world)))
        answers = asyncio.create_task(answer_all(world))
        chat = {} if "input" in fields else {"messages": [{"role": "user", "content": "a"}]}
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            named = {
                key: value.format(name) for key, value in fields.items() if isinstance(value, str)
            }
            body = {"model": "m", **chat, **fields, **named}
            sent = {key: value.format(name).encode() for key, value in headers.items()}
            assert (await client.post(path, json=body, headers=sent)).status_code == 200
            for ended in (quote(name), quote(name, safe=""), "s2"):
                answer = await client.post(f"/v1/sessions/{ended}/end")
                assert answer.json() == {"status": "ok"}
            assert (await client.post("/v1/sessions//end")).status_code == 404
        answers.cancel()
        return world.scheduler.sent

    add, end, quoted, other = asyncio.run(main())
    assert isinstance(add, AddReq)
    assert add.session == end.session == quoted.session != other.session
