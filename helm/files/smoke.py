"""The program of `helm test`: waits until the Service is ready, requests one token, reads /metrics.

If one of these steps fails, the program exits with a message.

Argument: the URL of the Service. Environment, if the server requires a key: API_KEY is the key, or
KEYS_FILE is a file for --api-key-file, and the program sends the first key in it.
"""

import json
import os
import re
import sys
import time
import urllib.error
import urllib.request

WAIT_S = 240.0  # less than the 5 minutes after which `helm test` gives up


def find_key() -> str:
    """The key to send; "" without one. A colon with a space after it ends the name of a key."""
    if file := os.environ.get("KEYS_FILE"):
        with open(file) as keys:
            lines = [line.strip() for line in keys if line.strip()]
        return re.split(r":[ \t]+", lines[0], maxsplit=1)[-1] if lines else ""
    return os.environ.get("API_KEY", "").strip()


def call(url: str, body: object = None) -> str:
    """The body of the response. Raises URLError unless the status is 200."""
    headers = {"Content-Type": "application/json"}
    if key := find_key():
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
        return answer.read().decode()


def wait_ready(base: str) -> None:
    """Waits until /readyz answers 200. Exits with a message after WAIT_S seconds."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            call(base + "/readyz")
            return
        except OSError as error:
            if time.monotonic() > deadline_s:
                sys.exit(f"the server was not ready within {WAIT_S:.0f} s: {error}")
            time.sleep(2)


def main(base: str) -> None:
    wait_ready(base)
    try:
        model = json.loads(call(base + "/v1/models"))["data"][0]["id"]
        request = {"model": model, "prompt": "Hello", "max_tokens": 1}
        answer = json.loads(call(base + "/v1/completions", request))
        metrics = call(base + "/metrics")
    except urllib.error.HTTPError as error:
        sys.exit(f"{error.url} returned {error.code}: {error.read().decode()[:500]}")
    if answer["usage"]["completion_tokens"] != 1:
        sys.exit(f"expected an answer of one token, got {answer}")
    if "minisgl_requests_total" not in metrics:
        sys.exit("/metrics does not contain minisgl_requests_total")
    sys.stdout.write(f"ok: {model} answered {answer['choices'][0]['text']!r}\n")


if __name__ == "__main__":
    main(sys.argv[1])
