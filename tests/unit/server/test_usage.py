"""Token counts in the answers of the Messages API."""

import json
from typing import Any

import msgspec
import pytest

from minisgl.core import SchedulerConfig
from minisgl.message.messages import TextUpdate, TokenizeResult
from minisgl.protocol.requests import MESSAGES
from minisgl.request.call import Call, Caller
from minisgl.request.convert import RequestConverter
from minisgl.server.answer.messages import MessagesWriter
from minisgl.settings import Limits
from tests.unit.server.fakes import CONFIG, FACTS

WIDE = msgspec.structs.replace(FACTS, kv_capacity_tokens=100)
PROMPT, STABLE, FIRST = 90, 85, 40  # in pages of 16 tokens: 80 and 32


def usage(body: dict[str, Any], cached: int, config: Any = CONFIG) -> dict[str, Any]:
    raw = json.dumps({"model": "m", "max_tokens": 2} | body).encode()
    request = RequestConverter(config).read(MESSAGES, raw, WIDE)
    call = Call(request, Caller(), [1])
    prompt = TokenizeResult(uid=1, token_ids=bytes(4 * PROMPT), prefixes=(STABLE, FIRST))
    call.fit([prompt], WIDE, Limits())
    call.apply(TextUpdate(uid=1, text="a", prompt_tokens=PROMPT, cached_tokens=cached))
    message = MessagesWriter(request).answer(call.choices[0])
    found: dict[str, Any] = msgspec.to_builtins(message.usage)
    return found


def block(text: str, ttl: str | None = None) -> dict[str, Any]:
    mark = {} if ttl is None else {"cache_control": {"type": "ephemeral", "ttl": ttl}}
    return {"type": "text", "text": text, **mark}


def chat(system: str | None = None, middle: str | None = None, end: str | None = None) -> Any:
    """A body with breakpoints of these times to live."""
    history = [block("a", middle), block("b", end)]
    messages = [{"role": "user", "content": history}]
    return {"system": [block("s", system)], "messages": messages}


@pytest.mark.parametrize(
    ("body", "cached", "five_minutes", "hour"),
    [
        (chat(), 16, 0, 0),
        (chat(end="5m"), 16, 64, 0),
        (chat(end="1h"), 16, 0, 64),
        (chat(system="1h", end="5m"), 0, 48, 32),
        (chat(system="1h", end="5m"), 48, 32, 0),
        (chat(system="5m"), 0, 32, 0),
        (chat(middle="5m"), 16, 16, 0),
        (chat() | {"cache_control": {"type": "ephemeral"}}, 0, 80, 0),
        (chat(end="5m"), 84, 0, 0),
    ],
)
def test_the_parts_of_the_usage_are_together_the_prompt(
    body: Any, cached: int, five_minutes: int, hour: int
) -> None:
    found = usage(body, cached)
    split = {"ephemeral_5m_input_tokens": five_minutes, "ephemeral_1h_input_tokens": hour}
    assert found["cache_creation"] == split
    assert found["cache_creation_input_tokens"] == five_minutes + hour
    assert found["cache_read_input_tokens"] == cached
    assert found["input_tokens"] == PROMPT - cached - five_minutes - hour


def test_a_server_without_a_prefix_cache_reports_no_creation() -> None:
    scheduler = SchedulerConfig(cache_type="naive")
    config = msgspec.structs.replace(CONFIG, scheduler=scheduler)
    assert usage(chat(end="5m"), 0, config)["cache_creation_input_tokens"] == 0
