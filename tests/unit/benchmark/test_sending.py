"""The order in which the requests of sessions are sent."""

import asyncio

import numpy as np

from minisgl.benchmark.client import Answer, StreamingClient
from minisgl.benchmark.latency import by_turn
from minisgl.benchmark.sending import open_loop
from minisgl.benchmark.trace import Load, Turn, Turns
from minisgl.utils.startup import Progress


class _Client(StreamingClient):
    """Notes when requests are sent and end. An answer takes several turns of the event loop."""

    def __init__(self) -> None:
        self.events: list[str] = []

    async def post(self, body: bytes, answer: Answer | None = None) -> Answer:
        self.events.append(f"send {body.decode()}")
        for _ in range(5):
            await asyncio.sleep(0)
        self.events.append(f"end {body.decode()}")
        return Answer(0.0, error="HTTP 503" if body == b"b" else None)


def test_a_request_is_sent_after_the_ends_of_those_that_it_waits_for() -> None:
    client = _Client()
    turns = [Turn(), Turn((0,)), Turn((0,)), Turn((1, 2), 0.001)]
    load = Load([np.zeros(1, dtype=np.int32)] * 4, [1] * 4, [0.0] * 4, turns=turns)

    async def run() -> list[Answer]:
        with Progress(total=4, unit="req", disable=True) as bar:
            return await open_loop(client, [b"a", b"b", b"c", b"d"], Turns(load, [0.0] * 4), bar)

    answers = asyncio.run(run())
    assert client.events == [
        "send a",
        "end a",
        "send b",
        "send c",
        "end b",
        "end c",
        "send d",
        "end d",
    ]
    # A failed request counts as ended.
    assert [answer.error for answer in answers] == [None, "HTTP 503", None, None]


def test_first_tokens_are_grouped_by_turn() -> None:
    answers = [Answer(0.0, [first_s], output_tokens=1) for first_s in (3.0, 1.0, 0.5, 0.7)]
    found = by_turn(answers, [1, 2, 3, 10])
    assert {name: row["p50"] for name, row in found.items()} == {
        "turn 1": 3.0,
        "turn 2": 1.0,
        "turns 3-10": 0.6,
    }
