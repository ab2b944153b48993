"""The shell's client: addresses, keys, and streams that end early."""

import socket
import threading

import pytest

from minisgl.shell.client import ChatClient, ServerError


@pytest.mark.parametrize(
    "url",
    [
        "localhost:1919",
        "https://localhost:1919",
        "http://:1919",
        "http://a:99999",
        "http://[::1",
        "",
    ],
)
def test_wrong_address_is_a_message(url: str) -> None:
    """Regression: an https address was used as HTTP at port 80, and other text gave a traceback."""
    with pytest.raises(ServerError, match="is not an address"):
        ChatClient(url, "m")


def test_key_is_sent_without_white_space() -> None:
    """Regression: a key with a newline at its end made every message end in a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        heads: list[bytes] = []

        def answer() -> None:
            with server.accept()[0] as connection:
                while b"}" not in (data := connection.recv(65536)):
                    heads.append(data)
                heads.append(data)
                connection.sendall(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        client = ChatClient(f"http://127.0.0.1:{server.getsockname()[1]}", "m", " key\n")
        with pytest.raises(ServerError):
            next(client.stream([{"role": "user", "content": "hello"}]))
        thread.join()
    assert b"\r\nauthorization: bearer key\r\n" in b"".join(heads).lower()


EVENT = b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("rest", "is_whole"),
    [(b"%x\r\n%s\r\n0\r\n\r\n" % (len(DONE), DONE), True), (b"", False), (b"9\r\nda", False)],
    ids=["whole", "cut between chunks", "cut in a chunk"],
)
def test_answer_that_breaks_off_is_an_error(rest: bytes, is_whole: bool) -> None:
    """A connection that ends between two chunks may look like the end of the answer."""
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as connection:
                while b"}" not in connection.recv(65536):
                    pass
                connection.sendall(head + b"%x\r\n%s\r\n" % (len(EVENT), EVENT) + rest)

        threading.Thread(target=answer).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        stream = ChatClient(url, "m").stream([{"role": "user", "content": "hello"}])
        assert next(stream) == "hi"
        if is_whole:
            assert list(stream) == []
        else:
            with pytest.raises(ServerError, match="connection was lost"):
                next(stream)
