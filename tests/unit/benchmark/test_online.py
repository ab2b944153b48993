"""The output of `bench online` when a server refuses requests."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from minisgl.benchmark.online import main
from minisgl.core import ConfigError

STREAM_TOKENS = 7
EVENT = b'data: {"choices":[{"text":"a"}],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\n'


class RefusesStreams(BaseHTTPRequestHandler):
    """Answers every request with one token, except those with STREAM_TOKENS, which it refuses."""

    protocol_version = "HTTP/1.1"
    status = 400
    info: bytes | None = None

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body["max_tokens"] == STREAM_TOKENS:
            self._answer(self.status, b'{"error":{"message":"streams are too long"}}')
        else:
            self._answer(200, EVENT)

    def do_GET(self) -> None:
        self._answer(404 if self.info is None else 200, self.info or b"")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), RefusesStreams) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_reason_of_failed_background_streams_is_printed(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["--requests", "2", "--output-tokens", "1", "1", "--beside", "2", "5"]
    flags = ["--served-name", "m", "--quiet", *load, str(STREAM_TOKENS)]
    assert main(["--url", url, *flags]) == 1
    out = capsys.readouterr().out
    assert "error: HTTP 400: " in out
    assert "streams are too long" in out
    assert json.loads(out.splitlines()[-1])["failed"] == 2


def test_the_file_has_the_times_of_requests_and_of_background_streams(
    url: str, tmp_path: Path
) -> None:
    """The gaps of streams beside prompts can be compared with the times of the prompts."""
    load = ["--requests", "2", "--output-tokens", "1", "1", "--beside", "3", "5", "1"]
    flags = ["--served-name", "m", "--quiet", "--json", str(tmp_path / "run"), "--samples"]
    main(["--url", url, *flags, *load])
    found = json.loads((tmp_path / "run").read_text())
    assert [len(row["outputs_s"]) for row in found["requests"]] == [1, 1]
    assert [len(row["outputs_s"]) for row in found["streams"]] == [1, 1, 1]
    assert found["requests"][0]["sent_s"] == 0
    assert all(row["sent_s"] < row["outputs_s"][0] < 0 for row in found["streams"])


def test_a_run_without_one_success_is_an_error(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = str(STREAM_TOKENS)
    load = ["--requests", "2", "--output-tokens", tokens, tokens, "--served-name", "m", "--quiet"]
    expected = r"every request failed.*streams are too long.*; if the server .* give --chat"
    with pytest.raises(ConfigError, match=expected):
        main(["--url", url, *load])
    assert "streams are too long" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "info", "flags"),
    [
        (404, None, []),
        (400, b'{"vocab_size": 50}', []),
        (400, None, ["--chat"]),
    ],
    ids=["wrong model", "known vocabulary", "chat"],
)
def test_chat_is_no_advice_where_token_ids_cannot_be_the_cause(
    status: int,
    info: bytes | None,
    flags: list[str],
    url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: a wrong model name and a prompt beyond the context gave the advice too."""
    monkeypatch.setattr(RefusesStreams, "status", status)
    monkeypatch.setattr(RefusesStreams, "info", info)
    tokens = str(STREAM_TOKENS)
    load = ["--requests", "2", "--output-tokens", tokens, tokens, "--served-name", "m", "--quiet"]
    with pytest.raises(ConfigError) as failure:
        main(["--url", url, *load, *flags])
    assert f"first error is: HTTP {status}: " in str(failure.value)
    assert "streams are too long" in str(failure.value)
    assert "--chat" not in str(failure.value)


@pytest.mark.parametrize("flags", [[], ["--url", "http://localhost", "--model", "m"]])
def test_one_of_url_and_model_must_be_given(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^give one of --url and --model$"):
        main(flags)
