"""An HTTP client for OpenAI-compatible servers with little CPU time per event, for measurements.

Each request is an asyncio task on an HTTP/1.1 connection that is reused. An event of a stream gets
its time when its bytes arrive. An event takes about 10 us of CPU time, so one core reads a hundred
thousand events per second.
"""

import asyncio
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec

from minisgl.core import ConfigError


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Error(msgspec.Struct):
    message: str = "no message"


class _StreamEvent(msgspec.Struct):
    """The fields of a stream event that this client reads."""

    choices: Sequence[_Choice] = ()
    usage: _Usage | None = None
    error: _Error | None = None

    @property
    def has_output(self) -> bool:
        return any(
            choice.text
            or (choice.delta and (choice.delta.content or choice.delta.reasoning_content))
            for choice in self.choices
        )


@dataclass(slots=True, eq=False)
class Answer:
    """One request and its streamed response. Times are seconds of time.perf_counter.

    sent_s     time at which the request was sent.
    outputs_s  arrival times of the events with output, in order.
    error      None when the response is complete and has no error.
    """

    sent_s: float
    outputs_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


class _Connection(asyncio.Protocol):
    """One connection, with one request at a time. It parses the response as the bytes arrive.

    reusable: the server keeps the connection open. silent: no byte of the response has arrived.
    """

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(_StreamEvent)
        self._done: asyncio.Future[None] | None = None
        self.reusable = False
        self.silent = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The transports of uvloop do not derive from asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)

    async def post(self, head: bytes, body: bytes, answer: Answer) -> None:
        """Send one request and read its response to the end.

        The connection is not lost before its first post: the loop resumes the caller of
        create_connection before it reads from the socket. StreamingClient posts at once, so
        connection_lost ends the wait for a response.
        """
        self._parser = httptools.HttpResponseParser(self)
        self._pending = b""
        self.reusable = False
        self.silent = True
        self._done = asyncio.get_running_loop().create_future()
        self._answer = answer
        answer.sent_s = time.perf_counter()
        self._transport.write(head % len(body) + body)
        await self._done

    def data_received(self, data: bytes) -> None:
        if not self._is_open():
            self.reusable = False
            self.close()
            return
        self._now_s = time.perf_counter()
        self.silent = False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.MsgspecError) as error:
            self._fail(f"{type(error).__name__}: {error}")
            self.close()

    def on_body(self, data: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._pending += data  # the body of an error response
            return
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (payload := line[5:].strip()) != b"[DONE]":
                self._read(self._decoder.decode(payload))

    def _read(self, event: _StreamEvent) -> None:
        answer = self._answer
        if event.has_output:
            answer.outputs_s.append(self._now_s)
        if event.usage is not None:
            answer.prompt_tokens = event.usage.prompt_tokens
            answer.output_tokens = event.usage.completion_tokens
            details = event.usage.prompt_tokens_details
            answer.cached_tokens = details.cached_tokens if details else 0
        if event.error is not None:
            answer.error = event.error.message

    def on_message_complete(self) -> None:
        if not self._is_open():
            self.reusable = False
            return
        status = self._parser.get_status_code()
        if status != 200:
            self._answer.error = f"HTTP {status}: {self._refusal()}"
        self.reusable = self._parser.should_keep_alive()
        self._finish()

    def _refusal(self) -> str:
        """Return the message of an error response, or the start of a body of another form."""
        start = self._pending[:300].decode("utf-8", "replace")
        try:
            error = self._decoder.decode(self._pending).error
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return start  # such as the page of a proxy
        return start if error is None else error.message

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._fail("the server closed the connection")

    def close(self) -> None:
        self._transport.close()

    def _is_open(self) -> bool:
        """Whether a request waits for its response.

        A server may send a 408 on a connection without a request, before it closes the connection.
        """
        return self._done is not None and not self._done.done()

    def _fail(self, error: str) -> None:
        if self._is_open():
            self._answer.error = error
            self._finish()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class StreamingClient:
    """Sends streaming POST requests to one path of a server. Open requests share no connection."""

    def __init__(self, url: str, path: str, api_key: str | None = None) -> None:
        """url: http or https URL of the server, without /v1. Raises ConfigError for other URLs."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is not an http or https URL")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        head = f"POST {parts.path.rstrip('/')}{path} HTTP/1.1\r\nhost: {parts.netloc}\r\n{key}"
        head = head.replace("%", "%%") + "content-type: application/json\r\n"
        self._head = head.encode() + b"content-length: %d\r\n\r\n"
        self._idle: list[_Connection] = []

    async def post(self, body: bytes, answer: Answer | None = None) -> Answer:
        """Send one request and return its answer. A failure is in its `error`.

        answer: filled while the response arrives, so that the caller can read it earlier.
        Cancelling the task closes the connection.
        """
        answer = answer or Answer(time.perf_counter())
        first_sent_s: float | None = None
        kept = self._kept_connection()
        if kept is not None:
            if await self._post_on(kept, body, answer):
                return answer
            answer.error = None
            first_sent_s = answer.sent_s
        loop = asyncio.get_running_loop()
        try:
            _, made = await loop.create_connection(
                _Connection, self._host, self._port, ssl=self._ssl
            )
        except OSError as error:
            answer.error = f"cannot connect: {error}"
            return answer
        await self._post_on(made, body, answer)
        answer.sent_s = first_sent_s or answer.sent_s  # the latency includes the failed attempt
        return answer

    def _kept_connection(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:  # False when the server has closed it meanwhile
                return connection
        return None

    async def _post_on(self, connection: _Connection, body: bytes, answer: Answer) -> bool:
        """Post on `connection`. Returns False if the server closed it without sending a byte."""
        try:
            await connection.post(self._head, body, answer)
        finally:
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()
        return not (connection.silent and answer.error)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
