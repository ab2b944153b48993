"""The prefixes that the offline LLM announces to the scheduler."""

import pytest

from minisgl.core import SamplingParams
from minisgl.llm import LLM
from minisgl.llm.workers import LocalWorker
from minisgl.message.messages import AddReq, ToScheduler


def test_a_chat_announces_the_tokens_that_its_next_turn_repeats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[ToScheduler] = []
    send = LocalWorker.send

    def recorded(worker: LocalWorker, message: ToScheduler) -> None:
        sent.append(message)
        send(worker, message)

    monkeypatch.setattr(LocalWorker, "send", recorded)
    chats = [[{"role": "user", "content": text}] for text in ("What is 12 + 30?", "Hello")]
    with LLM(num_pages=64, max_seq_len=256) as llm:
        llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=2), progress=False)
        plain = {"add_generation_prompt": False}
        stable = [len(llm.tokenizer.encode_chat(chat, plain)) for chat in chats]
    assert [each.prefixes for each in sent if isinstance(each, AddReq)] == [(n, 0) for n in stable]
