"""Sessions of clients, from the headers and bodies of requests to the scheduler."""

import asyncio
from typing import Any

import httpx
import pytest

from minisgl.message.messages import AddReq
from minisgl.server.app import build_app
from tests.unit.server.fakes import World
from tests.unit.server.test_app import FakeService, answer_all

REQUESTS: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("/v1/messages", {"max_tokens": 2}, {"x-claude-code-session-id": "s1"}),
    ("/v1/responses", {"input": "a", "prompt_cache_key": "s1"}, {}),
    ("/v1/chat/completions", {"prompt_cache_key": "s1"}, {}),
    ("/v1/chat/completions", {"session_id": "s1"}, {}),
    ("/v1/chat/completions", {"session_id": "s2"}, {"session_id": "s1"}),
]


@pytest.mark.parametrize(("path", "fields", "headers"), REQUESTS)
def test_the_end_of_a_session_has_the_key_of_its_requests(
    path: str, fields: dict[str, Any], headers: dict[str, str]
) -> None:
    async def main() -> list[Any]:
        world = World()
        transport = httpx.ASGITransport(build_app(FakeService(world)))
        answers = asyncio.create_task(answer_all(world))
        chat = {} if "input" in fields else {"messages": [{"role": "user", "content": "a"}]}
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"model": "m", **chat, **fields}
            assert (await client.post(path, json=body, headers=headers)).status_code == 200
            for name in ("s1", "s2"):
                ended = await client.post(f"/v1/sessions/{name}/end")
                assert ended.json() == {"status": "ok"}
        answers.cancel()
        return world.scheduler.sent

    add, end, other = asyncio.run(main())
    assert isinstance(add, AddReq)
    assert add.session == end.session != other.session
