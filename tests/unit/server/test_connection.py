"""The HTTP protocol of a connection, driven by the bytes that a socket would deliver."""

import asyncio
import contextlib

import pytest
from starlette.types import Receive, Scope, Send

from minisgl.server.edge.framer import MAX_HEADERS, MAX_SMALL_CHUNKS
from minisgl.settings.config import Limits
from tests.unit.server.wires import MOST, POST, Wired, answers


def in_two(data: bytes) -> list[tuple[bytes, bytes]]:
    return [(data[:at], data[at:]) for at in range(1, len(data))]


@pytest.mark.parametrize("name", [b"Upgrade", b"upgrade", b"UPGRADE"])
def test_upgrade_header_is_ignored_in_any_split(name: bytes) -> None:
    """Regression: a header in two packets was not found, and the parser read the body as HTTP/2."""
    offer = name + b": h2c\r\nUser-Agent: u\r\nConnection: Upgrade, HTTP2-Settings\r\n"
    request = POST + offer + b"content-length: 4\r\n\r\nbody"
    for parts in (*in_two(request), [request[i : i + 1] for i in range(len(request))]):
        given = answers(parts)
        assert given.startswith(b"HTTP/1.1 200"), parts
        assert given.endswith(b"/path body"), parts


def test_upgrade_header_of_a_later_request_keeps_its_body() -> None:
    """Regression: only the first head of a segment was searched for the header."""
    offer = b"upgrade: h2c\r\nconnection: Upgrade\r\ncontent-length: 4\r\n\r\nbody"
    assert answers([POST + b"\r\n", POST + offer]).endswith(b"/path body")


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_upgrade_header_of_the_last_request_of_a_connection_is_ignored(version: bytes) -> None:
    """Regression: such a request had no response."""
    start = b"POST /path HTTP/" + version + b"\r\nhost: x\r\nconnection: close\r\n"
    offer = b"upgrade: h2c\r\nconnection: Upgrade\r\n"
    request = start + offer + b"content-length: 4\r\n\r\nbody"
    for parts in ([request], *in_two(request)):
        given = answers(parts)
        assert given.endswith(b"/path body"), parts
        assert b"connection: close" in given
    assert answers([start.replace(b"POST", b"GET") + offer + b"\r\n"]).endswith(b"/path ")


@pytest.mark.parametrize("start", [b"x: ", b"user-agent: "])
def test_head_in_parts_is_bounded(start: bytes) -> None:
    room = MOST - len(POST + start + b"\r\n\r\n")
    for length, status in ((room, b"200"), (room + 1, b"431")):
        head = POST + start + b"y" * length + b"\r\n\r\n"
        for size in (1, 100, MOST, 2 * MOST):
            parts = [head[i : i + size] for i in range(0, len(head), size)]
            assert answers(parts).startswith(b"HTTP/1.1 " + status), (length, size)


@pytest.mark.parametrize(
    ("kind", "body"),
    [(b"content-length: 4", b"body"), (b"transfer-encoding: chunked", b"4\r\nbody\r\n0\r\n\r\n")],
)
@pytest.mark.parametrize("short", range(5))
def test_largest_head_may_have_a_body(kind: bytes, body: bytes, short: int) -> None:
    """Regression: the first bytes of the body counted as part of the head."""
    start = POST + kind + b"\r\nx: "
    head = start + b"y" * (MOST - len(start) - 4 - short) + b"\r\n\r\n"
    for parts in ([head, body], [head + body]):
        assert answers(parts).endswith(b"/path body")


@pytest.mark.parametrize("trailer", [b"a: b\r\n", b"a"])
def test_trailers_are_bounded(trailer: bytes) -> None:
    """Regression: 20 MB of trailers took 420 MB of memory until the end of the body."""
    chunked = POST + b"transfer-encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n"
    many = chunked + b"a: b\r\n" + trailer * 2 * MOST
    assert answers([chunked + b"a: b\r\n\r\n"]).endswith(b"/path body")
    for size in (100, len(many)):
        parts = [many[i : i + size] for i in range(0, len(many), size)]
        assert answers(parts).startswith(b"HTTP/1.1 431"), size


def test_body_may_have_any_size_and_chunks() -> None:
    body = b"y" * 5 * MOST
    whole = POST + b"content-length: %d\r\n\r\n%s" % (len(body), body)
    chunk = b"40\r\n" + b"y" * 64 + b"\r\n"
    rest, single = divmod(len(body), 64)
    chunks = b"1\r\ny\r\n" * single + chunk * rest
    chunked = POST + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    for request in (whole, chunked):
        for size in (1000, len(request)):
            parts = [request[i : i + size] for i in range(0, len(request), size)]
            assert answers(parts).endswith(b"/path " + body)


PATHS = [b"/%d" % number for number in range(20)]
PIPELINED = b"".join(b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n" % path for path in PATHS)


def test_only_the_first_of_pipelined_requests_is_answered() -> None:
    """Regression: 200 connections with 10,000 pipelined requests stopped the loop for seconds."""
    given = answers([PIPELINED])
    assert given.count(b"HTTP/1.1 ") == 1
    assert given.endswith(b"/0 ")
    assert b"connection: close" in given


def test_endless_pipelined_requests_are_not_parsed() -> None:
    """Bytes above the limit of a head end the connection, before or after the response."""
    given = answers([PIPELINED * 1000] * 3)
    assert given.count(b"HTTP/1.1 ") <= 1
    first = PIPELINED[: PIPELINED.index(b"GET /1 ")]
    assert answers([first, PIPELINED]).count(b"HTTP/1.1 ") == 2

    async def feed() -> None:
        wired = Wired()
        wired.connection.data_received(PIPELINED * 1000)
        assert wired.wire.aborted, "a client that reads nothing could keep the connection"
        assert wired.exceeded == ["max_head_bytes"]
        wired.close()

    asyncio.run(feed())


def test_request_behind_a_chunked_body_is_not_parsed() -> None:
    chunked = POST + b"transfer-encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n"
    given = answers([chunked + PIPELINED])
    assert given.count(b"HTTP/1.1 ") == 1
    assert given.endswith(b"/path body")
    assert b"connection: close" in given


def test_requests_one_after_the_other_keep_the_connection() -> None:
    request = POST + b"content-length: 4\r\n\r\nbody"
    given = answers([request, request, b"\r\n" + request])
    assert given.count(b"HTTP/1.1 200") == given.count(b"/path body") == 3
    assert b"connection: close" not in given


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (b"content-length: 8", b"\r\n\r\nbody"),
        (b"transfer-encoding: chunked", b"8\r\n\r\n\r\nbody\r\n0\r\n\r\n"),
        (b"transfer-encoding: chunked", b"4\r\nbody\r\n0\r\na: b\r\n\r\n"),
    ],
)
def test_rest_of_a_body_and_the_next_request_may_arrive_together(kind: bytes, body: bytes) -> None:
    """Regression: a client whose body arrived after a 404 got a 400 for its next request."""
    early = b"POST /early HTTP/1.1\r\nhost: x\r\n" + kind + b"\r\n\r\n"
    following = POST + kind + b"\r\n\r\n" + body
    for first, last in in_two(body + following):
        given = answers([early, first, last])
        assert given.count(b"HTTP/1.1 200") == 2, (first, last)
        assert given.endswith(b"body")
    whole = answers([early, body + following, following])
    assert whole.count(b"HTTP/1.1 200") == 3
    assert b"connection: close" not in whole


@pytest.mark.parametrize("count", [MAX_HEADERS, MAX_HEADERS + 1])
def test_number_of_headers_is_bounded(count: int) -> None:
    """Regression: 10,800 tiny headers of one head took 20 times their size."""
    head = b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a:b\r\n" * (count - 1) + b"\r\n"
    status = b"200" if count == MAX_HEADERS else b"431"
    for parts in ([head], [head[:50], head[50:]]):
        assert answers(parts).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (b"GET / HTTP/1.1\r\n", b"exactly one Host and"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nHost: a\r\n", b"exactly one Host and"),
        (b"GET / HTTP/1.0\r\nhost: a\r\nhost: b\r\n", b"exactly one Host and"),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n", b"HTTP/1.0 cannot have chunks"),
        (b"GET /\r\n", b"METHOD PATH"),
        (b"GET / HTTP/0.9\r\nhost: a\r\n", b"METHOD PATH"),
        (b"GET / HTTP/2.0\r\nhost: a\r\n", b"METHOD PATH"),
        (b"PRI * HTTP/2.0\r\n", b"METHOD PATH"),
        (b"GET / RTSP/1.0\r\nhost: a\r\n", b"METHOD PATH"),
        (POST + b"authorization: Bearer a\r\nAuthorization: b\r\n", b"at most one Authorization"),
        (b"GET  / HTTP/1.1\r\nhost: a\r\n", b"METHOD PATH"),
        (b"GET  / HTTP/1.1\r\nhost: a\r\nx: GET / HTTP/1.1\r\n", b"METHOD PATH"),
        (b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n", b"METHOD PATH"),
        (b"CONNECT h:80 HTTP/1.1\r\nhost: h\r\n", b"METHOD PATH"),
    ],
)
def test_ambiguous_head_is_a_400(head: bytes, reason: bytes) -> None:
    given = answers([head + b"\r\n"])
    assert given.startswith(b"HTTP/1.1 400")
    assert reason in given
    assert b"connection: close" in given


@pytest.mark.parametrize(
    ("path", "form"),
    [
        (b"/v1/messages", b'{"type":"error",'),
        (b"/v1/messages/count_tokens?beta=true", b'{"type":"error",'),
        (b"/v1/chat/completions", b'{"error":{'),
    ],
)
@pytest.mark.parametrize(
    "rest", [b"x: " + b"y" * MOST, b"transfer-encoding: chunked\r\n\r\nzz", b"host: y\r\n\r\n"]
)
def test_a_refused_request_gets_an_error_in_the_form_of_its_api(
    path: bytes, form: bytes, rest: bytes
) -> None:
    head, _, body = answers([b"POST %b HTTP/1.1\r\nhost: x\r\n%b" % (path, rest)]).partition(
        b"\r\n\r\n"
    )
    assert head.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 "))
    assert body.startswith(form)


def test_a_header_may_have_the_request_line_as_its_value() -> None:
    for value in (b"POST /path HTTP/1.1", b"POST /path HTTP/1.1 "):
        assert answers([POST + b"x: " + value + b"\r\ncontent-length: 4\r\n\r\nbody"]).endswith(
            b"/path body"
        )


def test_http_1_0_needs_no_host() -> None:
    assert answers([b"GET / HTTP/1.0\r\n\r\n"]).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("start", [b"\x16\x03\x01", b"get / HTTP/1.1", b"\r\n\r\nGET", b"A" * 33])
def test_bytes_that_begin_no_request_are_refused_at_once(start: bytes) -> None:
    assert answers([start]).startswith(b"HTTP/1.1 400")


def test_too_many_small_chunks_are_refused_at_once() -> None:
    """50 connections that sent chunks of one byte delayed a request for 5 seconds."""
    head, chunk = POST + b"transfer-encoding: chunked\r\n\r\n", b"1\r\ny\r\n"
    most = int(MAX_SMALL_CHUNKS * 64 / 63)
    assert answers([head + chunk * most + b"0\r\n\r\n"]).endswith(b"/path " + b"y" * most)

    async def feed() -> None:
        wired = Wired(Limits(max_head_bytes=2**16))
        await wired.receive(head)
        wired.connection.data_received(chunk * 10_000)
        assert wired.wire.written.startswith(b"HTTP/1.1 400")
        assert b"too many small chunks" in wired.wire.written
        assert wired.wire.is_closing()
        wired.close()

    asyncio.run(feed())


def test_an_error_after_the_response_is_not_a_second_response() -> None:
    """Regression: the 400 was the response to the next request of the client."""
    early = b"POST /early HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    assert answers([early, b"zz"]).endswith(b"/early ")


def test_request_that_arrives_during_a_response_closes_the_connection_after_it() -> None:
    async def begin(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"text"})

    async def feed() -> None:
        wired = Wired(app=begin)
        wired.connection.data_received(POST + b"\r\n")
        await asyncio.sleep(0)
        assert b"HTTP/1.1 200" in wired.wire.written
        await wired.receive(POST + b"\r\n")
        assert wired.wire.written.endswith(b"text\r\n0\r\n\r\n")
        assert wired.wire.written.count(b"HTTP/1.1 ") == 1
        assert wired.wire.is_closing()
        wired.close()

    asyncio.run(feed())


def test_handler_sees_that_its_client_is_gone() -> None:
    found = []

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        while not found or found[-1] != "http.disconnect":
            found.append((await receive())["type"])

    async def feed() -> None:
        wired = Wired(app=wait)
        await wired.receive(POST + b"content-length: 4\r\n\r\nbo")
        wired.close()
        await asyncio.sleep(0)
        assert found == ["http.request", "http.disconnect"]

    asyncio.run(feed())


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time a test moves."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    async def move(self, seconds: float) -> None:
        self.now_s += seconds
        await asyncio.sleep(0)
        await asyncio.sleep(0)


def test_idle_connections_and_slow_heads_are_closed() -> None:
    """Between requests a connection may wait for idle_s; a head may take head_timeout_s."""
    request = POST + b"content-length: 4\r\n\r\nbody"
    early = b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nbo"

    async def feed(clock: Clock) -> None:
        for parts, more, left_s, limit in (
            ([], b"", 10, "head_timeout_s"),
            ([request[:9]], request[9:11], 10, "head_timeout_s"),
            ([request], b"", 75, None),
            ([request, request], b"", 75, None),
            ([request, request[:9]], request[9:11], 10, "head_timeout_s"),
            ([early], b"d", 10, "head_timeout_s"),
            ([early, b"dy"], b"", 10, "head_timeout_s"),
        ):
            wired = Wired(Limits(head_timeout_s=10), idle_s=75)
            for part in parts:
                await wired.receive(part)
            await clock.move(left_s - 1)
            assert not wired.wire.is_closing(), parts
            await wired.receive(more)
            await clock.move(2)
            assert wired.wire.is_closing(), parts
            assert wired.exceeded == ([limit] if limit else []), parts
            assert wired.wire.aborted == (limit is not None), parts
            wired.close()
        wired = Wired(Limits(head_timeout_s=10), idle_s=75)
        await wired.receive(request[:-1])
        await clock.move(1000)
        assert not wired.wire.is_closing(), "the handler reads the body"
        wired.close()

    with contextlib.closing(Clock()) as clock:
        clock.run_until_complete(feed(clock))
