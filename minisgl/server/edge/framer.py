"""Cuts the bytes of a connection into requests, and refuses those that proxies read differently."""

import re

import httptools

from minisgl.core import InvalidRequest
from minisgl.server.errors import HeadTooLarge

MAX_HEADERS = 100
# A body may have one part for each 64 bytes, and this many more. A part takes 2 us, so a body in
# chunks of one byte would hold the event loop for seconds.
MAX_SMALL_CHUNKS = 256
# The start of a request line, which may be incomplete.
_START = re.compile(rb"\r?\n?(?:[A-Z]{1,32} |[A-Z]{0,32}\Z)")
# CONNECT is refused: the parser would take all bytes after its head for another protocol.
_REQUEST_LINE = re.compile(rb"\r?\n?(?!CONNECT )[A-Z]{1,32} [/Hh*][^\r\n]* HTTP/1\.([01])\r\n")
_PATH = re.compile(rb"\r?\n?[A-Z]{1,32} ([^ ?\r\n]*)")
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:", re.IGNORECASE)
_SINGLE = re.compile(rb"\r\n(host|authorization):", re.IGNORECASE)
# A header that offers another protocol, such as h2c from Java's client. The server removes it
# before parsing, because the parser would read the body as that protocol.
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
# The line before a chunk, complete and incomplete. A line after a chunk begins with the line end of
# that chunk. The last group of an incomplete line has bytes that need not be held.
# "*+" and "++" do not try shorter matches again: 256 KiB of an extension would take 20 ms. A group
# has neither: Python 3.11.2 would end the match after an attempt that failed.
_VALUE = rb"[\t -~\x80-\xff]*+"
_LINE, _LINE_START = rb"([0-9A-Fa-f]{1,16})(?:;%s)?\r\n", rb"[0-9A-Fa-f]{0,16}(?:;(%s))?\r?\Z"
_FIRST_CHUNK = re.compile(_LINE % _VALUE), re.compile(_LINE_START % _VALUE)
_NEXT_CHUNK = (
    re.compile(rb"\r\n" + _LINE % _VALUE),
    re.compile(rb"\r?\Z|\r\n" + _LINE_START % _VALUE),
)
_NAME = rb"[!#-'*+\-.0-9A-Z^-z|~]"
_TRAILERS = re.compile(rb"(?:%s++:%s\r\n)*" % (_NAME, _VALUE))
_TRAILER_START = re.compile(rb"(?:%s++:(%s)|%s(%s*+)|)\r?\Z" % (_NAME, _VALUE, _NAME, _NAME))


def check_head(head: bytes) -> None:
    """Refuse a complete head that proxies and servers read differently. Raises RequestError."""
    if head.count(b"\n") > MAX_HEADERS + 2:  # the request line and the empty line
        reason = f"the request has more than {MAX_HEADERS} headers"
        raise HeadTooLarge(reason, limit="max_headers")
    line = _REQUEST_LINE.match(head)
    if line is None:
        raise _invalid("the request line must be METHOD PATH HTTP/1.1 or METHOD PATH HTTP/1.0")
    if line[1] == b"0" and _CHUNKED.search(head):
        # A proxy that speaks HTTP/1.0 does not know the header, and takes the body for a request.
        raise _invalid("a body of HTTP/1.0 cannot have chunks; send Content-Length, or HTTP/1.1")
    names = [name.lower() for name in _SINGLE.findall(head)]
    if len(names) != len(set(names)) or (b"host" not in names and line[1] == b"1"):
        raise _invalid("a request must have exactly one Host and at most one Authorization header")


def _invalid(reason: str = "the request is not valid HTTP") -> InvalidRequest:
    return InvalidRequest(reason, code="invalid_http")


class _Head:
    """A complete head, as the parser of uvicorn reads it. Raises RequestError.

    path         as in the request line, without the query
    body_bytes   the value of Content-Length; None: the body has chunks
    has_body     bytes follow the head
    """

    def __init__(self, head: bytes) -> None:
        self._url = b""
        self.body_bytes: int | None = None
        self.has_body = True
        try:
            httptools.HttpRequestParser(self).feed_data(head)
            self.path = (httptools.parse_url(self._url).path or b"\xff").decode("ascii")
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, UnicodeDecodeError):
            raise _invalid() from None

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-length":
            self.body_bytes = int(value)

    def on_message_complete(self) -> None:
        self.has_body = False


class Framer:
    """Holds the bytes of a head until it is complete, and writes a body in chunks anew.

    The chunks of one read become one chunk, without extensions and trailers.

    in_request   a request has a complete head and an incomplete body
    path         the path of the last request, also if its head is incomplete or wrong
    """

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: of a head, and of extensions and trailers between two parts of a body."""
        self.in_request = False
        self.path = ""
        self._max_bytes = max_bytes
        self._held = bytearray()  # an incomplete head, or an incomplete line of a body in chunks
        self._searched = 0  # length of the part of `_held` in which no head ends
        self._left = 0  # bytes of the body, or of the chunk, that have not arrived
        self._in_chunks = self._in_trailers = False
        self._line = _FIRST_CHUNK
        self._surplus = 0  # bytes since the last part of a body in chunks
        self._small_chunks = 0.0  # parts of the body beyond one for each 64 bytes

    @property
    def held_size(self) -> int:
        """Number of bytes that wait for the bytes after them."""
        return len(self._held)

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Read up to the end of a request. Raises RequestError.

        Returns the bytes to parse, and the bytes of `data` after the request. A head is returned as
        a whole, together with the part of its body in `data`.
        """
        head = b""
        if not self.in_request:
            head, data = self._read_head(data)
        if not (self.in_request and data):
            return head, data
        if self._in_chunks:
            body, rest = self._read_chunks(data)
        else:
            body, rest = data[: self._left], data[self._left :]
            self._count_part(body)
            self.in_request = self._left > 0
        return head + body, rest

    def _read_head(self, data: bytes) -> tuple[bytes, bytes]:
        """The head once it is complete, and the bytes that follow it."""
        held = self._held
        held += data
        line = _PATH.match(held)
        self.path = line[1].decode("latin-1") if line else ""
        blank = held.find(b"\r\n\r\n", self._searched)
        size = len(held) + 1 if blank < 0 else blank + 4
        self._searched = max(0, len(held) - 3)
        if size > self._max_bytes:
            raise HeadTooLarge(f"the head exceeds {self._max_bytes} bytes")
        if not _START.match(held):
            raise _invalid()
        if blank < 0:
            return b"", b""
        head, rest = bytes(held[:size]), bytes(held[size:])
        held.clear()
        self._searched = 0
        check_head(head)
        head = _UPGRADE.sub(b"", head)
        found = _Head(head)
        self.path, self.in_request = found.path, found.has_body
        self._left, self._in_chunks = found.body_bytes or 0, found.body_bytes is None
        self._line, self._in_trailers = _FIRST_CHUNK, False
        self._surplus, self._small_chunks = 0, 0.0
        return head, rest

    def _read_chunks(self, data: bytes) -> tuple[bytes, bytes]:
        """The parts of all chunks as one chunk, and the bytes that follow the body."""
        if self._held:
            self._surplus -= len(self._held)
            data = bytes(self._held) + data
            self._held.clear()
        parts, at = [], 0
        while at < len(data) and self.in_request:
            if self._left:
                part = data[at : at + self._left]
                at += len(part)
                self._count_part(part)
                parts.append(part)
            elif self._in_trailers:
                at = self._skip_trailers(data, at)
            else:
                at = self._read_chunk_line(data, at)
        text = b"".join(parts)
        body = b"%x\r\n%s\r\n" % (len(text), text) if text else b""
        return body if self.in_request else body + b"0\r\n\r\n", data[at:]

    def _read_chunk_line(self, data: bytes, at: int) -> int:
        """Returns where the chunk begins; the end of `data` if its line is incomplete."""
        line, start = self._line
        found = line.match(data, at)
        if found is None:
            return self._hold(data, at, start)
        self._count_surplus(found.end() - at)
        self._line = _NEXT_CHUNK
        self._left = int(found[1], 16)
        self._in_trailers = self._left == 0
        return found.end()

    def _skip_trailers(self, data: bytes, at: int) -> int:
        """Returns where the trailers or the whole body end in `data`."""
        found = _TRAILERS.match(data, at)
        assert found is not None, "the pattern must match an empty text; this is a bug"
        self._count_surplus(found.end() - at)
        if data.startswith(b"\r\n", found.end()):
            self.in_request = False
            return found.end() + 2
        return self._hold(data, found.end(), _TRAILER_START)

    def _hold(self, data: bytes, at: int, start: re.Pattern[bytes]) -> int:
        """Hold an incomplete line without the bytes that can be dropped."""
        found = start.match(data, at)
        if found is None:
            raise _invalid()
        self._count_surplus(len(data) - at)
        begin, end = found.span(found.lastindex) if found.lastindex else (at, at)
        self._held += data[at:begin] + data[end:]
        return len(data)

    def _count_surplus(self, size: int) -> None:
        self._surplus += size
        if self._surplus > self._max_bytes:
            raise HeadTooLarge(f"chunk extensions or trailers exceed {self._max_bytes} bytes")

    def _count_part(self, part: bytes) -> None:
        """Count a part of the body that arrived at once."""
        self._left -= len(part)
        self._surplus = 0
        self._small_chunks = max(0.0, self._small_chunks + 1 - len(part) / 64)
        if self._small_chunks > MAX_SMALL_CHUNKS:
            reason = "the body has too many small chunks; send chunks of 64 bytes or more"
            raise InvalidRequest(reason, code="invalid_http", limit="max_small_chunks")
