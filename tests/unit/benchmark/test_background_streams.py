"""Background streams: which gaps between tokens count, and when the streams start and end."""

import asyncio
import gc

import numpy as np
import pytest

from minisgl.benchmark.background_streams import background_streams, summarise_streams
from minisgl.benchmark.client import Answer, StreamingClient
from minisgl.benchmark.trace import Load
from minisgl.core import ConfigError

BACKGROUND = Load([np.zeros(10, dtype=np.int32)] * 2, [6, 6], [0.0, 0.0])
LOAD = [Answer(10.0, [11.0]), Answer(10.5, [12.0])]


def test_a_gap_counts_when_its_second_output_arrives_during_the_load() -> None:
    streams = [Answer(0.0, [9.0, 9.9, 10.1, 11.9, 12.5]), Answer(0.0, [9.5, 11.5, 12.0, 12.25])]
    found = summarise_streams(BACKGROUND, streams, LOAD)
    # 9.9 to 10.1, 10.1 to 11.9; 9.5 to 11.5, 11.5 to 12.0
    assert found["itl_s"]["mean"] == pytest.approx((0.2 + 1.8 + 2.0 + 0.5) / 4)
    assert found["itl_s"]["max"] == pytest.approx(2.0)
    assert found["context_tokens"] == [10 + (2 + 1) / 2, 10 + (4 + 3) / 2]
    assert (found["streams"], found["failed"]) == (2, 0)


def test_a_stream_that_ends_before_the_load_has_failed() -> None:
    ended = Answer(0.0, [9.0, 11.0], output_tokens=6)
    broken = Answer(0.0, [9.0, 13.0], error="the server closed the connection")
    assert summarise_streams(BACKGROUND, [ended, broken], LOAD)["failed"] == 2
    later = Answer(0.0, [9.0, 13.0], output_tokens=6)
    assert summarise_streams(BACKGROUND, [later, later], LOAD)["failed"] == 0


def test_streams_run_inside_the_with_block_and_disconnect_after_it() -> None:
    disconnected: list[bool] = []

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        writer.write(b'data: {"choices":[{"text":"a"}]}\n\n')
        disconnected.append(await reader.read() == b"")
        writer.close()

    async def run() -> list[Answer]:
        server = await asyncio.start_server(endless, "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with background_streams(
                StreamingClient(url, "/v1/completions"), [b"{}"] * 3
            ) as streams:
                assert [len(stream.outputs_s) for stream in streams] == [1, 1, 1]
                assert not disconnected
            while len(disconnected) < 3:
                await asyncio.sleep(0.001)
        return streams

    streams = asyncio.run(asyncio.wait_for(run(), 20))
    assert disconnected == [True] * 3
    assert [stream.error for stream in streams] == [None] * 3


def test_no_garbage_is_collected_beside_streams_and_again_after_an_error() -> None:
    """Regression: after a failed row the collector stayed off."""

    async def run() -> None:
        async with background_streams(StreamingClient("http://127.0.0.1:1", "/"), []):
            assert not gc.isenabled()
            raise ConfigError("the load failed")

    try:
        with pytest.raises(ConfigError, match="the load failed"):
            asyncio.run(run())
        assert gc.isenabled()
    finally:
        gc.enable()
