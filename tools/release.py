"""Serves the demo model from an installed wheel and asks it one question: `make release-check`.

The environment of the wheel has only the package and its dependencies. The repository is on none of
its paths, so the check fails if the wheel lacks a file.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
START_S = 600.0
STOP_S = 120.0
CHAT = {
    "model": "minisgl-demo",
    "messages": [{"role": "user", "content": "What is 12 + 30?"}],
    "temperature": 0,
}
ANSWER = "42"


def package_version() -> str:
    """The version in minisgl/__init__.py."""
    text = (ROOT / "minisgl" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"$', text, re.M)
    assert found, "minisgl/__init__.py has a version"
    return found[1]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def get(url: str, body: object = None) -> bytes:
    """The body of the response. Raises urllib's errors."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return bytes(response.read())


def wait_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    """Return when the server is ready. Exits if it ended, or is not ready within START_S."""
    deadline = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            get(f"{url}/readyz")
            return
        except OSError:
            time.sleep(0.2)
    sys.exit(f"release-check: the server is not ready; exit code {server.poll()}")


def main(environment: Path) -> None:
    """Check the wheel in a virtual environment. Exits with a message at the first fault."""
    minisgl = environment.resolve() / "bin" / "minisgl"
    variables = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    variables["PATH"] = f"{minisgl.parent}:/usr/bin:/bin"
    with tempfile.TemporaryDirectory() as folder:
        version = subprocess.run(
            [minisgl, "--version"], cwd=folder, env=variables, capture_output=True, text=True
        ).stdout.split()[-1:]
        if version != [package_version()]:
            sys.exit(f"release-check: minisgl --version gives {version}, not {package_version()}")
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        server = subprocess.Popen([minisgl, "--port", str(port)], cwd=folder, env=variables)
        try:
            wait_ready(url, server)
            chat = json.loads(get(f"{url}/v1/chat/completions", CHAT))
            answer = chat["choices"][0]["message"]["content"]
            sizes = [len(get(f"{url}{path}")) for path in ("/", "/docs", "/openapi.json")]
            server.send_signal(signal.SIGTERM)
            code = server.wait(STOP_S)
        finally:
            server.kill()
    if answer != ANSWER or code != 0:
        sys.exit(f"release-check: answer {answer!r}, exit code {code}")
    sys.stdout.write(f"minisgl {version[0]} answered {answer!r}; pages of {sizes} bytes\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
