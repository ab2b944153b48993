"""The priorities of LLM.generate."""

from collections.abc import Iterator
from typing import Any

import pytest

from minisgl.core import InvalidRequest
from minisgl.llm import LLM
from minisgl.message.messages import AddReq


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", num_pages=64) as found:
        yield found


@pytest.mark.parametrize(("priority", "sent"), [(0, [0, 0]), (-3, [-3, -3]), ((5, -1), [5, -1])])
def test_each_prompt_is_sent_with_its_priority(
    llm: LLM, priority: Any, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[bytes, int] = {}
    send = llm.worker.send

    def record(message: Any) -> None:
        if isinstance(message, AddReq):
            found[message.token_ids] = message.priority
        send(message)

    monkeypatch.setattr(llm.worker, "send", record)
    llm.generate([[5, 6], [7, 8]], max_tokens=1, priority=priority, progress=False)
    assert [found[tokens] for tokens in sorted(found)] == sent


@pytest.mark.parametrize("priority", [None, 1.5, True, [1], [1, 2.0], "12", [1, True], 2**31])
def test_a_priority_that_is_no_integer_of_32_bits_is_refused(llm: LLM, priority: Any) -> None:
    with pytest.raises(InvalidRequest, match="an integer, or a list of 2 integers") as caught:
        llm.generate([[5], [6]], max_tokens=1, priority=priority, progress=False)
    assert caught.value.param == "priority"
