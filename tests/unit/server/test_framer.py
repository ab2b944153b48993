"""The bytes of a connection as requests: heads, bodies in chunks, and where a request ends."""

import inspect
import itertools
import re
from pathlib import Path

import httptools
import pytest

from minisgl.core import RequestError
from minisgl.server.edge.framer import MAX_SMALL_CHUNKS, Framer

MOST = 1024
NEXT = b"GET /next HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
LINES = (
    b"POST /path HTTP/1.1\r\nhost: x\r\n",
    b"\r\nPUT /path?a=/b HTTP/1.1\r\nHost: x\r\nexpect: 100-continue\r\n",
    b"POST http://x/path HTTP/1.1\r\nupgrade: h2c\r\nhost: x\r\nconnection: upgrade\r\n",
    b"POST /path HTTP/1.1\r\nconnection: close\r\nx: \r\nhost: x\r\n",
)
# The headers of a body and its bytes, and the body that a handler reads.
BODIES = (
    (b"\r\n", b""),
    (b"content-length: 0\r\n\r\n", b""),
    (b"Content-Length: 4\r\n\r\nbody", b"body"),
    (b"content-length: 8\r\n\r\n\r\n0\r\n\r\n\r", b"\r\n0\r\n\r\n\r"),
    (CHUNKED + b"\r\n0\r\n\r\n", b""),
    (CHUNKED + b"\r\n4\r\nbody\r\n0\r\n\r\n", b"body"),
    (CHUNKED + b"\r\n1\r\nb\r\n1\r\no\r\n2\r\ndy\r\n0\r\n\r\n", b"body"),
    (CHUNKED + b"\r\n004\r\nbody\r\n000\r\n\r\n", b"body"),
    (
        CHUNKED + b"\r\na\r\n0123456789\r\nA\r\n\r\n\r\n0\r\n\r\n\r\r\n0\r\n\r\n",
        b"0123456789\r\n\r\n0\r\n\r\n\r",
    ),
    (CHUNKED + b'\r\n4;a;b="c d"\r\nbody\r\n0;e=f\r\n\r\n', b"body"),
    (CHUNKED + b"\r\n4\r\nbody\r\n0\r\na: b\r\n\r\n", b"body"),
    (CHUNKED + b"\r\n4\r\nbody\r\n0\r\nhost: y\r\ncontent-length: 9\r\n\r\n", b"body"),
    (b"transfer-encoding: gzip, chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n", b"body"),
)
REFUSED = (
    *(
        CHUNKED + b"\r\n" + body
        for body in (
            b"4 \r\nbody",
            b" 4\r\nbody",
            b"\r\n4\r\nbody",
            b"4\nbody",
            b"0x4\r\nbody",
            b"-4\r\n",
            b"g",
            b"4\r\nbody0\r\n",
            b"4\r\nbody\n0\r\n",
            b"4\r\nbody\r\n\r\n0",
            b"4;a\nb\r\n",
            b"4;a\rb\r\n",
            b"4;\0\r\n",
            b"11111111111111111\r\n",
            b"0\r\na\r\n\r\n",
            b"0\r\n a: b\r\n\r\n",
            b"0\r\na: b\nc: d\r\n\r\n",
            b"0\r\na:\0\r\n\r\n",
            b"0\r\n: b\r\n\r\n",
        )
    ),
    b"content-length: 4\r\ncontent-length: 4\r\n\r\n",
    b"content-length: +4\r\n\r\n",
    b"content-length: 4\r\n" + CHUNKED + b"\r\n",
    CHUNKED + b"content-length: 4\r\n\r\n",
    b"transfer-encoding: gzip\r\n\r\n",
    b"transfer-encoding: chunked, gzip\r\n\r\n",
    CHUNKED + b"transfer-encoding: identity\r\n\r\n",
    b"a b: c\r\n\r\n",
    b"a: \0\r\n\r\n",
)


class Parsed:
    """The requests that the parser of uvicorn reads in these bytes."""

    def __init__(self, data: bytes) -> None:
        self.body, self.names, self.ends = b"", set[bytes](), 0
        httptools.HttpRequestParser(self).feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.names.add(name.lower())

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.ends += 1


def fed(*parts: bytes) -> tuple[bytes, bytes]:
    """The bytes to parse, and the bytes after the request."""
    framer, taken, rest = Framer(MOST), b"", b""
    for number, part in enumerate(parts):
        assert number == 0 or framer.in_request or not taken
        given, rest = framer.feed(part)
        taken += given
    assert not framer.in_request
    assert framer.path == "/path"
    return taken, rest


@pytest.mark.parametrize("line", LINES)
def test_requests_in_any_two_reads_are_the_same_requests(line: bytes) -> None:
    """The head arrives whole, the body in any parts, and the next request is left."""
    for kind, body in BODIES:
        request = line + kind
        for at in range(1, len(request)):
            taken, rest = fed(request[:at], request[at:] + NEXT)
            found = Parsed(taken)
            assert (found.body, found.ends, rest) == (body, 1, NEXT), (request, at)
            assert "upgrade" not in found.names


@pytest.mark.parametrize("kind", REFUSED)
def test_requests_that_servers_read_differently_are_refused_in_any_two_reads(kind: bytes) -> None:
    request = LINES[0] + kind
    for at in range(len(request)):
        with pytest.raises(RequestError) as raised:
            fed(request[:at], request[at:])
        assert raised.value.code == "invalid_http"


def test_no_pattern_repeats_a_group_without_backtracking() -> None:
    """Regression: Python 3.11.2, that of Debian 12, refused trailers that arrived in two reads."""
    assert not re.search(r"\)[*+?]\+", Path(inspect.getfile(Framer)).read_text("utf-8"))


def test_chunks_of_one_read_become_one_chunk() -> None:
    """One read with many chunks wakes the application once, with all of them."""
    framer = Framer(MOST)
    framer.feed(LINES[0] + CHUNKED + b"\r\n")
    assert framer.feed(b"1\r\ny\r\n" * 200) == (b"c8\r\n" + b"y" * 200 + b"\r\n", b"")


@pytest.mark.parametrize(
    "line", [b"a:b\r\n", b"upgrade: h2c\r\n", b"x"], ids=["headers", "upgrades", "one header"]
)
def test_incomplete_head_takes_no_more_memory_than_its_bytes(line: bytes) -> None:
    """No object is made for a header before the head is complete."""
    framer = Framer(2**16)
    head = b"GET / HTTP/1.1\r\nhost: x\r\nx: y"
    for part in itertools.chain([head], itertools.repeat(line, 1000)):
        assert framer.feed(part) == (b"", b"")
        assert framer.held_size <= 2**16


@pytest.mark.parametrize("start", [b"4;", b"4;a=", b"0\r\na", b"0\r\na:"])
def test_incomplete_extensions_and_trailers_are_not_held(start: bytes) -> None:
    framer = Framer(MOST)
    framer.feed(LINES[0] + CHUNKED + b"\r\n" + start)
    for _ in range(10):
        framer.feed(b"b" * 90)
    assert framer.held_size < 10
    with pytest.raises(RequestError, match="extensions or trailers exceed"):
        framer.feed(b"b" * 200)


def test_small_parts_of_a_body_are_counted_however_they_arrive() -> None:
    for kind, part in ((CHUNKED, b"1\r\ny\r\n"), (b"content-length: 9999\r\n", b"y")):
        framer = Framer(MOST)
        framer.feed(LINES[0] + kind + b"\r\n")
        for _ in range(int(MAX_SMALL_CHUNKS * 64 / 63)):
            framer.feed(part)
        with pytest.raises(RequestError, match="too many small chunks"):
            framer.feed(part)
