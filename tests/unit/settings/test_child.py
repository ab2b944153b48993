"""The environment of child processes."""

import sys

import msgspec
import pytest

from minisgl.settings.child import ChildSpec
from tests.unit.server.fakes import CONFIG
from tests.unit.utils.supervising import supervising

TUNABLES = "GLIBC_TUNABLES"


@pytest.mark.parametrize(
    ("role", "given", "found"),
    [
        ("scheduler", None, "glibc.malloc.hugetlb=1"),
        ("scheduler", "glibc.malloc.arena_max=4", "glibc.malloc.arena_max=4"),
        ("api", None, None),
    ],
)
def test_only_schedulers_ask_for_huge_pages_and_the_user_decides(
    monkeypatch: pytest.MonkeyPatch, role: str, given: str | None, found: str | None
) -> None:
    """Regression: with huge pages, 3,000 TLS clients filled 313 MiB of the API process."""
    monkeypatch.delenv(TUNABLES, raising=False)
    if given is not None:
        monkeypatch.setenv(TUNABLES, given)
    spec = ChildSpec(role="", index=0, socket_dir="", reason_fd=-1, config=CONFIG)
    code = f"import os, sys; sys.exit(os.environ.get({TUNABLES!r}) != {found!r})"
    with supervising() as supervisor:
        spawned = msgspec.structs.replace(spec, role=role).spawn((sys.executable, "-c", code))
        assert supervisor.adopt(spawned).process.wait(30) == 0
