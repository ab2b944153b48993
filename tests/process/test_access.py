"""Access to the real server: HTTPS, keys, heads, connections, and clients that do not read."""

import contextlib
import http.client
import json
import resource
import select
import socket
import ssl
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from tests.patience import patience
from tests.process.harness import JSON_BODY, ServerProcess, run_server, wait_for

pytestmark = pytest.mark.process

LIMITS = ("--max-header-bytes", "4096", "--read-timeout", "1", "--max-connections", "3")
HEAD_TIMEOUT_S = 1
LIMITS += ("--head-timeout", str(HEAD_TIMEOUT_S))


@pytest.fixture(scope="module")
def keyed(tiny_model: Path):
    flags = ("--api-key", "sesame", "--admin-api-key", "root", "--num-pages", "512")
    with run_server("--model", str(tiny_model), *flags, *LIMITS) as server:
        yield server.wait_ready()


def client(server: ServerProcess, key: str = "sesame") -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=server.url, headers=headers, timeout=patience())


def connect(server: ServerProcess) -> socket.socket:
    parts = urlsplit(server.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=patience())


def received(connection: socket.socket) -> bytes:
    """All bytes until the server closes the connection."""
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


def answered(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body of one response. The connection stays open."""
    with http.client.HTTPResponse(connection) as response:
        response.begin()
        return response.status, response.read()


def test_openai_client_with_and_without_the_key(keyed: ServerProcess) -> None:
    base = keyed.url + "/v1"
    assert openai.OpenAI(base_url=base, api_key="sesame").models.list().data
    with pytest.raises(openai.AuthenticationError) as refused:
        openai.OpenAI(base_url=base, api_key="wrong", max_retries=0).models.list()
    assert refused.value.code == "invalid_api_key"
    assert keyed.status("/livez") == 200


def test_admin_sees_aborts_and_flushes(keyed: ServerProcess) -> None:
    admin, user = client(keyed, "root"), client(keyed)
    assert user.get("/server_info").status_code == 401
    body = {"model": "tiny", "prompt": [1 + i % 30 for i in range(64)], "max_tokens": 1}

    def cached() -> int:
        usage = user.post("/v1/completions", json=body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() > 0
    assert admin.post("/flush_cache").json() == {"status": "ok"}
    assert cached() == 0
    long = {**body, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    headers = {"x-request-id": "mine"}
    with user.stream("POST", "/v1/completions", json=long, headers=headers) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert admin.post("/abort", json={"request_id": "min"}).json() == {"aborted": 0}
        assert admin.post("/abort", json={"request_id": "mine"}).json() == {"aborted": 1}
        events = [line.removeprefix("data: ") for line in lines if line]
    assert json.loads(events[-2])["error"]["code"] == "cancelled"
    assert events[-1] == "[DONE]"


def test_detokenize_inverts_tokenize(keyed: ServerProcess) -> None:
    user = client(keyed)
    ids = user.post("/tokenize", json={"prompt": "hello wörld"}).json()
    assert ids["count"] == len(ids["tokens"]) > 0
    assert user.post("/detokenize", json={"tokens": ids["tokens"]}).json() == {
        "prompt": "hello wörld"
    }
    chat = user.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert chat["max_model_len"] == ids["max_model_len"]
    assert "hi" in user.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    for path, body in [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": [1]}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": "a"}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [1], "more": 1}),
    ]:
        assert user.post(path, json=body).status_code == 400, (path, body)


@pytest.mark.parametrize("head", [b"x" * 9000, b"GET / HTTP/1.1\r\nx: " + b"y" * 9000])
def test_endless_head_is_a_431_or_invalid_http(keyed: ServerProcess, head: bytes) -> None:
    before = keyed.limits_exceeded()["max_head_bytes"]
    with connect(keyed) as connection:
        connection.sendall(head)
        answer = received(connection)
    is_large = answer.startswith(b"HTTP/1.1 431")
    assert keyed.limits_exceeded()["max_head_bytes"] == before + is_large
    assert answer.split(b"\r\n")[0].split()[1] in (b"431", b"400")
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"]


def test_head_over_the_limit_in_one_packet_is_refused(keyed: ServerProcess) -> None:
    """Regression: the limit applied to incomplete heads only, so one packet could exceed it."""
    size, start = 4096, b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx: "
    for length, status in ((size, b"200"), (size + 1, b"431")):
        with connect(keyed) as connection:
            connection.sendall(start + b"y" * (length - len(start) - 4) + b"\r\n\r\n")
            assert received(connection).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize("before", [b"", b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"])
def test_connection_with_an_incomplete_head_is_closed(keyed: ServerProcess, before: bytes) -> None:
    """The head of the first request of a connection, or of a later one."""
    count = keyed.limits_exceeded()["head_timeout_s"]
    with connect(keyed) as connection:
        connection.sendall(before)
        if before:
            assert answered(connection)[0] == 200
        connection.sendall(b"GET /livez HTTP/1.1\r\nx: y")
        with contextlib.suppress(ConnectionResetError):
            received(connection)
    assert keyed.limits_exceeded()["head_timeout_s"] == count + 1


def test_too_many_headers_are_a_431(keyed: ServerProcess) -> None:
    before = keyed.limits_exceeded()["max_headers"]
    with connect(keyed) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n" + b"a:b\r\n" * 100 + b"\r\n")
        assert received(connection).startswith(b"HTTP/1.1 431")
    assert keyed.limits_exceeded()["max_headers"] == before + 1


def posted(head: bytes = b"", **body: object) -> bytes:
    text = json.dumps({"model": "tiny", "prompt": "a", "ignore_eos": True, **body}).encode()
    head += JSON_BODY + b"authorization: Bearer sesame\r\ncontent-length: %d\r\n\r\n" % len(text)
    return b"POST /v1/completions HTTP/1.1\r\n" + head + text


def test_head_timeout_does_not_end_a_response(keyed: ServerProcess) -> None:
    """Regression: the start of the next head started the timer, which closed the connection."""
    with connect(keyed) as connection:
        connection.sendall(posted(max_tokens=1900, stream=True))
        data = connection.recv(65536)
        connection.sendall(b"GET /livez HTTP/1.1\r\nx: y")
        end_s = time.monotonic() + 2 * HEAD_TIMEOUT_S
        while b"data: [DONE]" not in data and time.monotonic() < end_s:
            part = connection.recv(65536)
            assert part, "the server closed the connection before the end of the response"
            data = data[-16:] + part


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_behind_a_pipelined_request_aborts_the_first(
    keyed: ServerProcess, stream: bool
) -> None:
    """uvicorn notifies only the last request, and does not read while one waits."""
    before = keyed.metrics()["requests_total{outcome=abort}"]
    with connect(keyed) as connection:
        connection.sendall(posted(max_tokens=1900, stream=stream))
        wait_for(lambda: keyed.metrics()["requests_running"] == 1, "the request")
        connection.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
    wait_for(lambda: keyed.metrics()["requests_running"] == 0, "its end")
    assert keyed.metrics()["requests_total{outcome=abort}"] == before + 1
    assert "Traceback" not in keyed.stderr


@pytest.mark.parametrize("name", [b"Upgrade", b"upgrade"])
def test_upgrade_header_is_ignored(keyed: ServerProcess, name: bytes) -> None:
    """Regression: Java's client offers h2c; the server then read the request body as HTTP/2."""
    offer = name + b": h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEA\r\n"
    head, _, body = posted(offer, max_tokens=2).partition(b"\r\n\r\n")
    for parts in ((head + b"\r\n\r\n", body), (head + b"\r\n\r\n" + body,)):
        with connect(keyed) as connection:
            for part in parts:
                connection.sendall(part)
            assert answered(connection)[0] == 200


def test_body_keeps_text_like_an_upgrade_header(keyed: ServerProcess) -> None:
    """Regression: the text was removed from bodies too; the server waited for missing bytes."""
    body = b"{}\r\nUpgrade: h2c"
    head = b"POST /tokenize HTTP/1.1\r\n" + JSON_BODY + b"authorization: Bearer sesame\r\n"
    with connect(keyed) as connection:
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        status, answer = answered(connection)
        assert status == 400
        assert b"not valid JSON" in answer


def trickled(connection: socket.socket, path: str, key: str) -> int:
    """Send a body byte by byte. Returns the status when the server closes the connection."""
    head = f"POST {path} HTTP/1.1\r\n{JSON_BODY.decode()}authorization: Bearer {key}\r\n"
    connection.sendall(f"{head}content-length: 999\r\n\r\n{{".encode())
    status, _ = answered(connection)
    connection.settimeout(0.05)
    with contextlib.suppress(ConnectionError):
        for _ in range(400):
            connection.sendall(b" ")
            with contextlib.suppress(TimeoutError):
                if not connection.recv(1):
                    return status
        pytest.fail("after 400 bytes of the body the connection is still open")
    return status


@pytest.fixture(scope="module")
def hasty(tiny_model: Path):
    flags = ("--head-timeout", "0.5", "--max-wait", "0.5", "--api-key", "sesame")
    with run_server("--model", str(tiny_model), *flags, stub="echo") as server:
        yield server.wait_ready()


@pytest.mark.parametrize(
    ("path", "key", "status", "limits"),
    [
        ("/v1/chat/completions", "sesame", 503, {"max_wait_s", "head_timeout_s"}),
        ("/nowhere", "sesame", 404, {"head_timeout_s"}),
        ("/v1/chat/completions", "wrong", 401, {"head_timeout_s"}),
    ],
)
def test_connection_with_an_incomplete_body_is_closed(
    hasty: ServerProcess, path: str, key: str, status: int, limits: set[str]
) -> None:
    """Regression: the connection counted in --max-connections forever."""
    before = hasty.limits_exceeded()
    with connect(hasty) as connection:
        assert trickled(connection, path, key) == status
    found = {name for name, count in hasty.limits_exceeded().items() if count > before[name]}
    assert found == limits


def test_idle_connection_after_a_late_body_is_closed(keyed: ServerProcess) -> None:
    """Regression: the end of a rejected body stopped the timer of the next request head."""
    before = keyed.limits_exceeded()["head_timeout_s"]
    with connect(keyed) as connection:
        connection.sendall(
            b"POST /v1/nothing HTTP/1.1\r\n" + JSON_BODY + b"content-length: 2\r\n\r\n{"
        )
        assert answered(connection)[0] == 401
        connection.sendall(b"}")
        with contextlib.suppress(ConnectionError):
            assert received(connection) == b""
    assert keyed.limits_exceeded()["head_timeout_s"] == before + 1


def test_requests_above_max_connections_are_refused_and_probes_are_not(
    keyed: ServerProcess,
) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with client(keyed) as user:
        streams = [user.stream("POST", "/v1/completions", json=body) for _ in range(3)]
        answers = [stream.__enter__() for stream in streams]
        refused = user.get("/v1/models")
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert keyed.limits_exceeded()["max_connections"] == 1
        assert keyed.status("/livez") == 200
        for answer in answers:
            answer.close()
    wait_for(lambda: client(keyed).get("/v1/models").status_code == 200, "the end of the streams")


def test_probe_port_serves_only_the_probes_and_answers_while_the_main_port_is_full(
    tiny_model: Path,
) -> None:
    """Regression: 200 idle connections, --max-connections and some more, kept all probes out."""
    flags = ("--max-connections", "3", "--probe-port", "0")
    with run_server("--model", str(tiny_model), *flags, stub="echo") as server:
        server.wait_ready()
        for path in ("/livez", "/readyz", "/health"):
            assert httpx.get(server.probe_url + path, timeout=patience()).status_code == 200
            assert server.status(path) == 200
        for path in ("/metrics", "/v1/models", "/docs", "/server_info"):
            assert httpx.get(server.probe_url + path, timeout=patience()).status_code == 404
        full = select.poll()
        with contextlib.ExitStack() as stack:
            for _ in range(300):
                full.register(stack.enter_context(connect(server)), select.POLLIN)
            wait_for(lambda: len(full.poll(0)) >= 300 - 3 - 128, "refusals")
            assert server.status("/livez") == 0
            for path in ("/livez", "/readyz", "/health"):
                assert httpx.get(server.probe_url + path, timeout=patience()).status_code == 200


def test_probe_port_answers_beside_more_connections_than_open_files(tiny_model: Path) -> None:
    """Regression: 1,024 idle connections took all files, and the log had thousands of lines."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    flags = ("--model", str(tiny_model), "--probe-port", "0")
    try:
        with (
            run_server(*flags, stub="echo", max_files=1024) as server,
            contextlib.ExitStack() as stack,
        ):
            server.wait_ready()
            closed = select.poll()
            for number in range(1424):
                closed.register(stack.enter_context(connect(server)), select.POLLIN)
                if number >= 1024 and number % 50 == 0:
                    answer = httpx.get(server.probe_url + "/livez", timeout=patience())
                    assert answer.status_code == 200
            wait_for(lambda: len(closed.poll(0)) > 1424 - 1024, "refusals")
            assert len(closed.poll(0)) < 1424 - 512, "most files serve connections"
            assert server.stderr.count("--max-connections 2048 is lowered to") == 1
            assert "ERROR" not in server.stderr
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_client_that_does_not_read_is_disconnected(keyed: ServerProcess) -> None:
    body = {"model": "tiny", "prompt": ["a"] * 8, "max_tokens": 1900, "ignore_eos": True}
    text = json.dumps({**body, "stream": True, "logprobs": 20}).encode()
    parts = urlsplit(keyed.url)
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect((parts.hostname, parts.port))
        deaf.sendall(
            b"POST /v1/completions HTTP/1.1\r\n" + JSON_BODY + b"authorization: Bearer sesame\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(text), text)
        )
        admin = client(keyed, "root")

        def open_requests() -> int:
            return int(admin.get("/server_info").json()["open_requests"])

        wait_for(lambda: open_requests() == 1, "the request")
        wait_for(lambda: open_requests() == 0, "the end of the request")
    wait_for(lambda: "finish=abort" in keyed.stderr, "the log line of the aborted request")
    assert keyed.limits_exceeded()["read_timeout_s"] == 1


def test_https(tiny_model: Path, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    made += ["-nodes", "-days", "1", "-subj", "/CN=localhost", "-keyout", str(key)]
    made += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(certificate)]
    try:
        subprocess.run(made, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    flags = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    flags += ("--max-connections", "1")
    with run_server("--model", str(tiny_model), *flags, stub="echo") as server:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(verify=context, base_url=server.url, timeout=patience()) as user:
            wait_for(lambda: _ready(user), "readiness")
            body = {"model": "tiny", "prompt": "one two", "max_tokens": 3}
            assert user.post("/v1/completions", json=body).status_code == 200
        # Connections count from the start of their TLS handshake.
        ended = select.poll()
        with contextlib.ExitStack() as stack:
            for _ in range(700):
                ended.register(stack.enter_context(connect(server)), select.POLLIN)
            wait_for(lambda: len(ended.poll(0)) >= 700 - 129, "refusals", seconds=30)
            assert len(ended.poll(0)) < 700


def _ready(user: httpx.Client) -> bool:
    try:
        return user.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False
