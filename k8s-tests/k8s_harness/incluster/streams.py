"""Streams completions from inside the cluster, with the standard library and without retries.

argv[1]: JSON {"url", "key", "priority", "repeat", "streams": [{"tokens", "keep_alive"}, ...]}. Each
stream has a thread. With `repeat`, a thread starts the next call when a call ends, until stdin has
a line or ends. stdout: one JSON line for the first text of a call, and one for its end.
"""

import http.client
import json
import select
import sys
import threading
import urllib.parse
from typing import Any

READ_TIMEOUT_S = 300.0  # timeout of one read
Event = dict[str, Any]


class Caller:
    """The calls of one thread. With `keep_alive` they share one connection."""

    def __init__(self, worker: int, config: Event, write: "Writer") -> None:
        self._worker = worker
        self._url = urllib.parse.urlsplit(config["url"])
        self._key = config.get("key")
        self._priority = config.get("priority", 0)
        self._stream = config["streams"][worker]
        self._connection: http.client.HTTPConnection | None = None
        self._write = write
        self.calls = 0

    def call(self) -> None:
        """Runs one stream and writes one line about its end, also after an error."""
        seen: Event = {"status": 0, "pieces": 0, "tokens": 0, "usage": None, "finish": None}
        seen |= {"done": False, "error": None, "asked": self._stream["tokens"]}
        name = {"worker": self._worker, "call": self.calls}
        self.calls += 1
        try:
            self._request(seen, name)
        except (OSError, http.client.HTTPException, ValueError) as error:
            seen["error"] = f"{type(error).__name__}: {error}"
            self._close()
        self._write({"event": "end", **name, **seen})

    def _request(self, seen: Event, name: Event) -> None:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        if not self._stream["keep_alive"]:
            headers["Connection"] = "close"
        connection = self._connected()
        connection.request("POST", "/v1/completions", json.dumps(self._body()), headers)
        answer = connection.getresponse()
        seen["status"] = answer.status
        if answer.status != 200:
            seen["error"] = answer.read().decode(errors="replace")
        else:
            for line in answer:
                if line.startswith(b"data: "):
                    self._data(line[6:].strip(), seen, name)
            if not seen["done"]:
                seen["error"] = seen["error"] or "the stream ended early"
        if answer.will_close or not self._stream["keep_alive"]:
            self._close()

    def _data(self, data: bytes, seen: Event, name: Event) -> None:
        if data == b"[DONE]":
            seen["done"] = True
            return
        event = json.loads(data)
        if "error" in event:
            seen["error"] = json.dumps(event["error"])
        for choice in event.get("choices", []):
            if not seen["pieces"]:
                self._write({"event": "first", **name})
            seen["pieces"] += 1
            seen["tokens"] += len(choice.get("token_ids") or [])
            seen["finish"] = choice.get("finish_reason") or seen["finish"]
        if usage := event.get("usage"):
            seen["usage"] = usage["completion_tokens"]

    def _body(self) -> Event:
        # The first token differs from call to call, so that no prompts share a prefix.
        first = 5 + (self._worker * 7919 + self.calls * 31) % 1000
        return {
            "model": "minisgl-demo",
            "prompt": [first, *range(5, 25)],
            "max_tokens": self._stream["tokens"],
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "priority": self._priority,
        }

    def _connected(self) -> http.client.HTTPConnection:
        """The open connection, or a new one if the server has closed it, as connection pools do."""
        open_one = self._connection
        if open_one is not None and open_one.sock is not None:
            if not select.select([open_one.sock], [], [], 0)[0]:
                return open_one
            self._close()
        host, port = self._url.hostname or "", self._url.port
        self._connection = http.client.HTTPConnection(host, port, timeout=READ_TIMEOUT_S)
        return self._connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


class Writer:
    """Writes whole lines from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        with self._lock:
            sys.stdout.write(json.dumps(event) + "\n")
            sys.stdout.flush()


def main() -> None:
    config = json.loads(sys.argv[1])
    write = Writer()
    stop = threading.Event()

    def work(worker: int) -> None:
        caller = Caller(worker, config, write)
        caller.call()
        while config["repeat"] and not stop.is_set():
            caller.call()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(config["streams"]))]
    for thread in threads:
        thread.start()
    if config["repeat"]:
        sys.stdin.readline()
        stop.set()
    for thread in threads:
        thread.join()
    write({"event": "over"})


if __name__ == "__main__":
    main()
