"""The session that the headers or the body of a request name."""

import pytest

from minisgl.request.sessions import HEADERS, session_key, session_name


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_names_the_session_before_the_body(header: str) -> None:
    assert session_name({header: "one", "x-request-id": "two"}, "three") == "one"
    assert session_name({header: ""}, "three") == "three"
    assert session_name({}, "") == ""


def test_clients_with_different_keys_never_share_a_session() -> None:
    keys = [session_key(client, "name") for client in ("a", "b", "a")]
    assert keys[0] == keys[2] != keys[1]
    assert {len(session_key("a", name)) for name in ("x", "x" * 100_000, "é")} == {32}
    assert session_key("a", "") == ""
