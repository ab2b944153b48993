"""Priorities and render routes in the API server."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from minisgl.core import ConfigError, InvalidRequest, Overloaded
from minisgl.server.context import CallContext
from minisgl.settings.keys import key_hashes, lowest_priorities
from tests.unit.server.fakes import CONFIG, World
from tests.unit.server.test_app import FakeService

KEYS = "people priority=-1: k1\nbatch priority=5: k2\nother: k3\nk4 priority=2: x: y\n"


def written(folder: Path, text: str) -> str:
    path = folder / "keys"
    path.write_text(text)
    return str(path)


def test_a_line_of_the_key_file_gives_the_lowest_priority_of_its_name(tmp_path: Path) -> None:
    file = written(tmp_path, KEYS)
    assert lowest_priorities(file, None) == {"people": -1, "batch": 5, "k4": 2}
    assert set(key_hashes([], file).values()) == {"people", "batch", "other", "k4"}
    for key, client in (("k2", "batch"), ("x: y", "k4")):
        hashed = next(iter(key_hashes([key], None)))
        assert key_hashes([], file)[hashed] == client


def test_two_lowest_priorities_of_one_name_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "a priority=1: k1\na: k2\na priority=2: k3\n")
    with pytest.raises(ConfigError, match="the client a the lowest priorities 1 and 2"):
        lowest_priorities(file)


def allowed(client: str, wanted: int | None, **config: Any) -> int:
    context = object.__new__(CallContext)
    context.client_name = client
    context.service = FakeService(World(), msgspec.structs.replace(CONFIG, **config))
    return context.allowed_priority(wanted)


KEYED: dict[str, Any] = {
    "api_key_hashes": {"h": "batch"},
    "lowest_priorities": {"people": -1, "batch": 5},
}


@pytest.mark.parametrize(
    ("client", "wanted", "given"),
    [
        ("people", None, 0),
        ("people", -1, -1),
        ("people", 7, 7),
        ("batch", None, 5),
        ("batch", 6, 6),
        ("default", None, 0),
        ("default", 3, 3),
    ],
)
def test_a_request_has_the_wanted_priority_or_the_default_of_its_key(
    client: str, wanted: int | None, given: int
) -> None:
    assert allowed(client, wanted, **KEYED) == given


@pytest.mark.parametrize(("client", "wanted"), [("people", -2), ("batch", 4), ("default", -1)])
def test_a_lower_number_than_the_key_allows_is_refused(client: str, wanted: int) -> None:
    with pytest.raises(InvalidRequest, match="priority must be at least") as caught:
        allowed(client, wanted, **KEYED)
    assert caught.value.param == "priority"


def test_a_server_without_keys_accepts_every_number() -> None:
    assert [allowed("default", wanted) for wanted in (None, -9, 9)] == [0, -9, 9]


def test_a_full_queue_of_one_class_refuses_no_request_of_another() -> None:
    world = World(max_queued_reqs=2)
    calls = [world.open(1, priority=7), world.open(1, priority=1)]
    with pytest.raises(Overloaded):
        world.open(1, priority=3)
    calls += [world.open(2), world.open(2, priority=-1)]
    assert world.engine.open_choices == {"default": 6}
    for call in calls:
        world.engine.close(call)
    assert world.is_empty
