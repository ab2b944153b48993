"""The shell's HTTP client: waits until the server is ready, and streams chat responses."""

import json
import time
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import httpx

Message = dict[str, str]
_QUIET_S = 600.0  # the longest time between two parts of a response
_POLL_S = 0.2  # between two requests to a server that is not ready
_KEY_HINT = "; set MINISGL_API_KEY to the key of the server"


class ServerError(Exception):
    """The server refused a request, failed, or cannot be reached. The user sees the message."""


class ChatClient:
    """Talks to one server. To end a request early, close its stream: this closes the connection.

    model: the name of a served model; None: the first one that the server lists.
    key: the API key, sent with each chat without its outer white space; "" for a server without
    keys.
    """

    def __init__(self, url: str, model: str | None, key: str = "") -> None:
        """Raises ServerError if `url` is not an address such as http://127.0.0.1:1919."""
        try:
            address = httpx.URL(url)
            is_address = address.scheme == "http" and 0 < (address.port or 80) < 2**16
        except httpx.InvalidURL:
            is_address = False
        if not is_address or not address.host:
            raise ServerError(f"{url} is not an address such as http://127.0.0.1:1919")
        headers = {"authorization": f"Bearer {key.strip()}"} if key.strip() else {}
        # trust_env=False: a proxy from the environment could not reach a server on this machine.
        self._http = httpx.Client(base_url=url, headers=headers, timeout=_QUIET_S, trust_env=False)
        self._model = model

    def wait_ready(self) -> None:
        """Return once /readyz answers 200.

        Raises ServerError if no server answers, or if it does not serve the model.
        """
        try:
            while self._http.get("/readyz").status_code != 200:
                time.sleep(_POLL_S)
            listed = self._http.get("/v1/models")
            if listed.status_code != 200:
                hint = _KEY_HINT if listed.status_code == 401 else ""
                raise ServerError(_message(_parse(listed.content)) + hint)
            served = [model["id"] for model in _parse(listed.content)["data"]]
            if self._model not in (None, *served):
                names = " and ".join(served)
                raise ServerError(f"the running server serves {names}, and not {self._model}")
            self._model = self._model or served[0]
        except httpx.HTTPError as error:
            raise ServerError(f"the server cannot be reached: {error}") from None

    def stream(self, messages: list[Message]) -> Generator[str, None, None]:
        """Yield the text of the answer, in parts, as it arrives. Raises ServerError."""
        body = {"model": self._model, "messages": messages, "stream": True}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise ServerError(_message(_parse(response.read())))
                yield from _contents(response.iter_lines())
        except httpx.HTTPError as error:
            raise ServerError(f"the connection was lost: {error}") from None


def _contents(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        if line.startswith("data: [DONE]"):
            return
        if not line.startswith("data: "):
            continue
        event = _parse(line.removeprefix("data: "))
        if "error" in event:
            raise ServerError(_message(event))
        for choice in event.get("choices", ()):
            text = choice["delta"].get("content")
            if text:
                yield text
    raise ServerError("the connection was lost before the end of the answer")


def _parse(data: str | bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        raise ServerError("the server's response is not JSON") from None
    return value if isinstance(value, dict) else {}


def _message(body: dict[str, Any]) -> str:
    error = body.get("error")
    return str(error.get("message")) if isinstance(error, dict) else "the request was refused"
