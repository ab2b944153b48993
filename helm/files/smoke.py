"""`helm test`: the service is ready, names a model, makes one token and shows its metrics.

Argument: the service's URL. Environment: API_KEY, where clients need one.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request

WAIT_S = 240.0  # under the five minutes that `helm test` gives


def call(url: str, body: object = None) -> str:
    """The text of a 200 answer; URLError for everything else."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("API_KEY", "").strip():
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
        return answer.read().decode()


def wait_ready(base: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            call(base + "/readyz")
            return
        except OSError as error:
            if time.monotonic() > deadline_s:
                sys.exit(f"not ready within {WAIT_S:.0f} s: {error}")
            time.sleep(2)


def main(base: str) -> None:
    wait_ready(base)
    try:
        model = json.loads(call(base + "/v1/models"))["data"][0]["id"]
        request = {"model": model, "prompt": "Hello", "max_tokens": 1}
        answer = json.loads(call(base + "/v1/completions", request))
        metrics = call(base + "/metrics")
    except urllib.error.HTTPError as error:
        sys.exit(f"{error.url}: {error.code} {error.read().decode()[:500]}")
    if answer["usage"]["completion_tokens"] != 1:
        sys.exit(f"expected one token: {answer}")
    if "minisgl_requests_total" not in metrics:
        sys.exit("/metrics names no minisgl_requests_total")
    sys.stdout.write(f"ok: {model} answered {answer['choices'][0]['text']!r}\n")


if __name__ == "__main__":
    main(sys.argv[1])
