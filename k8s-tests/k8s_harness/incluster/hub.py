"""A substitute for the Hugging Face hub that serves one model: the demo model of its image.

argv[1]: the port; 0: a free port. The script prints the port. GET /fetched lists the downloaded
files. The script connects to no other server.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from minisgl.demo import model_path

SHA = "0123456789abcdef0123456789abcdef01234567"
FILES = {path.name: path.read_bytes() for path in model_path().iterdir() if path.is_file()}
FETCHED: list[str] = []


class Hub(BaseHTTPRequestHandler):
    """The three routes of the hub that a download uses."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = self.path.split("?")[0]
        if path == "/fetched":
            return self._send(json.dumps(FETCHED).encode(), True)
        if path.startswith("/api/models/owner/demo/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": SHA}
                for name, data in FILES.items()
            ]
            return self._send(json.dumps(tree).encode(), with_body)
        if path.startswith("/api/models/owner/demo"):
            siblings = [{"rfilename": name} for name in FILES]
            info = {"id": "owner/demo", "sha": SHA, "siblings": siblings}
            return self._send(json.dumps(info).encode(), with_body)
        name = path.rpartition("/")[2]
        if "/resolve/" not in path or name not in FILES:
            self.send_error(404)
            return None
        if with_body:
            FETCHED.append(name)
        return self._send(FILES[name], with_body, {"ETag": f'"{name}"', "X-Repo-Commit": SHA})

    def _send(self, body: bytes, with_body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(200)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)


if __name__ == "__main__":
    server = ThreadingHTTPServer(("0.0.0.0", int(sys.argv[1])), Hub)
    print(server.server_port, flush=True)
    server.serve_forever()
