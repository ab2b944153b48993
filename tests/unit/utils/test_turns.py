"""The queue in which clients take turns."""

from minisgl.utils.turns import Turns


def test_clients_take_turns_and_items_keep_their_order() -> None:
    turns: Turns[str] = Turns()
    for item in ("a1", "a2", "a3"):
        turns.add("a", item)
    turns.add("b", "b1")
    assert [turns.take() for _ in range(5)] == ["b1", "a1", "a2", "a3", None]
    assert not turns


def test_client_that_returns_does_not_pass_the_others() -> None:
    turns: Turns[str] = Turns()
    turns.add("b", "b1")
    turns.add("a", "a1")
    assert turns.take() == "a1"
    turns.add("a", "a2")
    assert [turns.take(), turns.take()] == ["b1", "a2"]


def test_items_can_be_withdrawn_and_clients_left_out() -> None:
    turns: Turns[str] = Turns()
    turns.add("a", "a1")
    turns.add("b", "b1")
    turns.remove("a", "a1")
    turns.remove("c", "c1")
    assert turns.take(lambda client, _: client != "b") is None
    assert turns.take() == "b1"


def test_an_item_passes_those_of_its_client_that_must_wait() -> None:
    turns: Turns[str] = Turns()
    for item in ("long 1", "long 2", "short"):
        turns.add("a", item)
    assert turns.take(lambda _, item: item == "short") == "short"
    assert [turns.take(), turns.take()] == ["long 1", "long 2"]
