"""The client against a server that sends given bytes, split anywhere."""

import asyncio
import contextlib
import re
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop

from minisgl.benchmark.client import Answer, StreamingClient
from minisgl.core import ConfigError

USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
)
STREAM = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    b": keep-alive\n\n"
    b'data: {"choices":[{"delta":{"content":"a\\nb"}}]}\r\n\r\n'
    b'data: {"choices":[{"text":"c","finish_reason":null}],"usage":null}\n\n'
    b'data: {"choices":[{"text":"","finish_reason":"stop"}]}\n\n' + USAGE + b"data: [DONE]\n\n"
)


def chunked(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


@contextlib.asynccontextmanager
async def serving(pieces: list[bytes], close: bool = False) -> AsyncIterator[tuple[str, list[int]]]:
    """Yield a URL where every request gets `pieces`, and a list with an entry per connection."""
    connections: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                if close:
                    break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", connections


def ask(pieces: list[bytes], count: int = 1, close: bool = False) -> tuple[list[Answer], int]:
    async def run() -> tuple[list[Answer], int]:
        async with serving(pieces, close) as (url, connections):
            client = StreamingClient(url, "/v1/completions")
            answers = [await client.post(b"{}") for _ in range(count)]
            client.close()
            return answers, len(connections)

    return asyncio.run(run())


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_only_events_with_output_count_for_any_split_of_the_bytes(size: int) -> None:
    whole = chunked(STREAM)
    pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
    [answer], _ = ask(pieces)
    assert answer.error is None
    assert len(answer.outputs_s) == 2
    assert answer.sent_s <= answer.outputs_s[0] <= answer.outputs_s[1]
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (5, 4, 2)


def test_connections_are_reused() -> None:
    answers, connections = ask([chunked(STREAM)], count=3)
    assert [answer.error for answer in answers] == [None] * 3
    assert connections == 1


def test_a_kept_connection_that_closes_meanwhile_is_replaced() -> None:
    """The server closes the kept connection while the second request is sent.

    The server sends no byte, so the client sends the request once more, on a new connection. The
    latency counts from the first attempt. If no byte comes on the new connection either, the
    request has failed.
    """
    closed_s: list[float] = []

    async def run() -> tuple[list[Answer], int]:
        connections = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(1)
            await reader.readuntil(b"{}")
            if len(connections) < 3:
                writer.write(chunked(STREAM))
                with contextlib.suppress(asyncio.IncompleteReadError):
                    await reader.readuntil(b"{}")
            closed_s.append(time.perf_counter())
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            client = StreamingClient(f"http://127.0.0.1:{port}", "/v1/completions")
            answers = [await client.post(b"{}") for _ in range(3)]
            client.close()
            return answers, len(connections)

    answers, connections = asyncio.run(run())
    assert [answer.error for answer in answers] == [None, None, "the server closed the connection"]
    assert [len(answer.outputs_s) for answer in answers] == [2, 2, 0]
    assert connections == 3
    assert answers[1].sent_s < closed_s[0] < answers[1].outputs_s[0]


@pytest.mark.parametrize("reset", [False, True], ids=["end", "reset"])
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_connection_that_the_server_closes_at_once_is_an_error_of_the_answer(
    new_loop: Callable[[], asyncio.AbstractEventLoop], reset: bool
) -> None:
    """The connection may be closed before the client sends its request, or while it connects."""
    count = 20

    def close_all() -> None:
        for _ in range(count):
            connection, _ = listener.accept()
            # A linger time of 0 s turns the close into a reset.
            linger = struct.pack("ii", reset, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            connection.close()

    async def run() -> list[Answer]:
        port = listener.getsockname()[1]
        client = StreamingClient(f"http://127.0.0.1:{port}", "/v1/completions")
        return [await client.post(b"{}") for _ in range(count)]

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=close_all)
        server.start()
        with asyncio.Runner(loop_factory=new_loop) as runner:
            answers = runner.run(run())
        server.join()
    assert len(answers) == count
    assert all(
        re.match("the server closed the connection|cannot connect", answer.error or "")
        for answer in answers
    )


def test_bytes_after_a_complete_response_change_no_answer() -> None:
    """A server may send a 408 to a kept connection before it closes it.

    The 408 arrives after the first response, and together with the second one.
    """
    late = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 4\r\n\r\nlate"

    async def run() -> list[Answer]:
        is_answered = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"{}")
            writer.write(chunked(STREAM))
            await is_answered.wait()
            writer.write(late)
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            client = StreamingClient(f"http://127.0.0.1:{port}", "/v1/completions")
            answers = [await client.post(b"{}")]
            [kept] = client._idle
            is_answered.set()
            while kept.reusable:
                await asyncio.sleep(0)
            answers.append(await client.post(b"{}"))
            client.close()
            return answers

    for answer in asyncio.run(run()):
        assert (answer.error, len(answer.outputs_s)) == (None, 2)


def test_errors_are_reported() -> None:
    refusal = b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nfull"
    assert ask([refusal])[0][0].error == "HTTP 503: full"
    body = b'{"error":{"message":"too long","code":400}}'
    openai = b"HTTP/1.1 400 Bad\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    assert ask([openai])[0][0].error == "HTTP 400: too long"
    other = openai.replace(b"error", b"fault")
    assert ask([other])[0][0].error == 'HTTP 400: {"fault":{"message":"too long","code":400}}'
    page = chunked(b"<html>\n<h1>Bad Gateway</h1>\n</html>\n").replace(b"200", b"502", 1)
    assert "Bad Gateway" in (ask([page])[0][0].error or ""), (
        "the error page of a proxy has several lines"
    )
    broken = chunked(b'data: {"error":{"message":"it failed"}}\n\n')
    assert ask([broken])[0][0].error == "it failed"
    cut = chunked(STREAM)[:200]
    assert ask([cut], close=True)[0][0].error == "the server closed the connection"
    assert "HttpParser" in (ask([b"no http\r\n\r\n"])[0][0].error or "")


def test_a_refused_connection_is_an_error_of_the_answer() -> None:
    client = StreamingClient("http://127.0.0.1:1", "/v1/completions")
    assert "cannot connect" in (asyncio.run(client.post(b"{}")).error or "")
    with pytest.raises(ConfigError, match="URL"):
        StreamingClient("localhost:80", "/")
