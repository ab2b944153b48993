"""The shell's HTTP client: readiness and streamed chat answers, with the standard library only."""

import http.client
import json
import os
import time
from collections.abc import Generator, Iterator
from typing import Any
from urllib.parse import urlsplit

Message = dict[str, str]


class ServerError(Exception):
    """The server refused, failed or is gone; the message is for the person at the terminal."""


class ChatClient:
    """Speaks to one server. A stream that is closed early ends the request on the server too."""

    def __init__(self, url: str, model: str, timeout_s: float = 600.0) -> None:
        """Raises ServerError for what is no address."""
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port or 80
        except ValueError as error:
            raise ServerError(f"{url} is no address: {error}") from None
        if parts.scheme != "http" or not self._host:
            raise ServerError(f"{url} is no address such as http://127.0.0.1:1919")
        self._model = model
        self._timeout_s = timeout_s
        key = os.environ.get("MINISGL_API_KEY", "").strip()
        self._credentials = {"authorization": f"Bearer {key}"} if key else {}

    def wait_ready(self, poll_s: float = 0.2) -> None:
        """Return once /readyz says 200. Raises ServerError when the server is not there."""
        while True:
            try:
                connection = self._connect()
                connection.request("GET", "/readyz")
                status = connection.getresponse().status
                connection.close()
            except (OSError, http.client.HTTPException) as error:
                raise ServerError(f"the server cannot be reached: {error}") from None
            if status == 200:
                return
            time.sleep(poll_s)

    def stream(self, messages: list[Message]) -> Generator[str, None, None]:
        """The pieces of the answer as they come."""
        connection = self._connect()
        try:
            body = {"model": self._model, "messages": messages, "stream": True}
            headers = {"content-type": "application/json", **self._credentials}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ServerError(_message(_parse(response.read())))
            yield from _contents(response)
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"the connection was lost: {error}") from None
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)


def _contents(response: http.client.HTTPResponse) -> Iterator[str]:
    for line in response:
        if line.startswith(b"data: [DONE]"):
            return
        if not line.startswith(b"data: "):
            continue
        event = _parse(line[len(b"data: ") :])
        if "error" in event:
            raise ServerError(_message(event))
        for choice in event.get("choices", ()):
            text = choice["delta"].get("content")
            if text:
                yield text
    raise ServerError("the connection was lost before the end of the answer")


def _parse(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        raise ServerError("the server's answer is not JSON") from None
    return value if isinstance(value, dict) else {}


def _message(body: dict[str, Any]) -> str:
    error = body.get("error")
    return str(error.get("message")) if isinstance(error, dict) else "the server refused"
