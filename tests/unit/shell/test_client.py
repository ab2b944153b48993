"""Where the shell's client looks for a server."""

import pytest

from minisgl.shell import ChatClient, ServerError


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
def test_what_is_no_address_is_said(url: str) -> None:
    """It spoke HTTP to port 80 for an https address, or ended in a traceback."""
    with pytest.raises(ServerError, match="is no address"):
        ChatClient(url, "m")
