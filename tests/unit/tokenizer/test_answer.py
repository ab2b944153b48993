"""What is told beside the text: reasoning, ids, log-probabilities, and none of what is cut."""

import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.core import FinishReason
from minisgl.message.messages import (
    Finished,
    PrefillDone,
    PromptTokenLogprobs,
    TextSpec,
    TextUpdate,
    TokenLogprobs,
)
from minisgl.tokenizer import Vocabulary
from minisgl.tokenizer.answer import OpenAnswer

BEGIN, END, EOS = 256, 257, 258
TABLE = [bytes([byte]) for byte in range(256)] + [b"<think>", b"</think>", b"<eos>"]
THINKS = Vocabulary(TABLE, frozenset({EOS}), (BEGIN, END))
PLAIN = Vocabulary(TABLE, frozenset({EOS}))


def told(
    vocabulary: Vocabulary, tokens: list[int], spec: TextSpec, one_by_one: bool = True
) -> list[TextUpdate]:
    opened = PrefillDone(uid=1, prompt_tokens=1, cached_tokens=0, text=spec)
    answer = OpenAnswer(vocabulary, opened)
    updates = []
    for token_id in tokens:
        found = TokenLogprobs(uid=1, logprob=-0.5, top_ids=[token_id], top_logprobs=[-0.5])
        answer.push(token_id, True, found)
        if one_by_one or answer.stream.stopped:
            updates.append(answer.take(None))
        if answer.stream.stopped:
            break
    else:
        updates.append(answer.take(Finished(uid=1, reason=FinishReason.LENGTH)))
    return [update for update in updates if update is not None]


def texts(updates: list[TextUpdate]) -> tuple[str, str]:
    return "".join(u.reasoning for u in updates), "".join(u.text for u in updates)


def test_reasoning_is_told_apart_wherever_it_begins() -> None:
    tokens = [*b"\nwhy", END, *b"\n\nyes\n"]
    begun = told(THINKS, tokens, TextSpec(prompt_tail=[BEGIN, 10], reasoning=True))
    assert texts(begun) == ("why", "yes\n")
    assert begun[-1].reasoning_tokens == 4
    assert begun[-1].completion_tokens == len(tokens)
    own = told(THINKS, [BEGIN, *tokens], TextSpec(prompt_tail=[], reasoning=True))
    assert texts(own) == ("why", "yes\n")
    ended = told(THINKS, [*b"yes"], TextSpec(prompt_tail=[BEGIN, 10, END, 10], reasoning=True))
    assert texts(ended) == ("", "yes")


def test_reasoning_stays_text_when_not_wanted_or_not_known() -> None:
    tokens = [BEGIN, *b"a", END, *b"b"]
    for vocabulary, spec in [
        (THINKS, TextSpec(prompt_tail=[])),
        (PLAIN, TextSpec(prompt_tail=[], reasoning=True)),
    ]:
        assert texts(told(vocabulary, tokens, spec)) == ("", "<think>a</think>b")


def test_text_withheld_for_a_stop_string_stays_on_its_side_of_the_border() -> None:
    spec = TextSpec(prompt_tail=[BEGIN], stop=["xy"], reasoning=True)
    assert texts(told(THINKS, [*b"ax", END, *b"yb"], spec)) == ("ax", "yb")


def cut(text: str, missing: int) -> list[int]:
    """Bytes as tokens; the last character may be incomplete."""
    return [*text.encode()][: len(text.encode()) - missing]


@given(
    st.text("abc€é", max_size=8).flatmap(lambda t: st.integers(0, 2).map(lambda n: cut(t, n)))
    | st.lists(st.sampled_from([*b"abc\xff", *"€é".encode()]), max_size=8),
    st.lists(st.sampled_from(["b", "ca", "€a", "\ufffdb"]), max_size=2),
    st.booleans(),
    st.booleans(),
)
def test_logprobs_are_told_of_exactly_the_tokens_whose_text_is(
    tokens: list[int], stops: list[str], include_stop: bool, one_by_one: bool
) -> None:
    spec = TextSpec(prompt_tail=[], stop=stops, include_stop=include_stop)
    updates = told(PLAIN, tokens, spec, one_by_one)
    entries = [entry for update in updates for entry in update.logprobs]
    text = texts(updates)[1]
    kept = b"".join(entry.data for entry in entries).decode("utf-8", "replace")
    assert kept == text
    # Each byte lies in the last character of all bytes up to it, whole or not.
    data = bytes(tokens)
    ends = [len(data[: index + 1].decode("utf-8", "replace")) for index in range(len(entries))]
    assert [entry.offset for entry in entries] == [end - 1 for end in ends]
    seen = 0
    for update in updates:  # never told before its text has begun to come out
        seen += len(update.text)
        assert all(entry.offset < seen for entry in update.logprobs)


def test_silent_answer_tells_the_prompt_only() -> None:
    ids = [*"é!".encode()]
    spec = TextSpec(prompt_tail=[], prompt_ids=array.array("i", ids).tobytes(), silent=True)
    answer = OpenAnswer(PLAIN, PrefillDone(uid=1, prompt_tokens=3, cached_tokens=0, text=spec))
    answer.push_prompt(
        PromptTokenLogprobs(
            uid=1,
            position=1,
            logprobs=[-1.0, -2.0],
            top_ids=[[65], [66]],
            top_logprobs=[[-0.1], [-0.2]],
        )
    )
    answer.push(65, True, None)
    update = answer.take(Finished(uid=1, reason=FinishReason.STOP))
    assert update is not None
    assert (update.text, update.completion_tokens, update.finish) == ("", 0, FinishReason.LENGTH)
    assert [(e.logprob, e.offset) for e in update.prompt_logprobs] == [(None, 0), (-1, 0), (-2, 1)]
    assert update.prompt_logprobs[1].top == [(b"A", -0.1)]


@pytest.mark.parametrize(("next_byte", "offset"), [(0xA9, 1), (65, 2)], ids=["goes on", "does not"])
def test_offset_behind_a_prompt_that_ends_in_half_a_character(next_byte: int, offset: int) -> None:
    """The echo shows the half, and the answer the whole, or the half again."""
    ids = [0xC3]
    spec = TextSpec(prompt_tail=ids, prompt_ids=array.array("i", ids).tobytes())
    (update,) = told(PLAIN, [next_byte, 65], spec, one_by_one=False)
    text = PLAIN.decode(ids) + update.text
    assert [text[entry.offset] for entry in update.logprobs] == [text[offset], "A"]
    assert [entry.offset for entry in update.logprobs] == [offset, offset + 1]


def test_end_behind_half_a_character_has_its_offset() -> None:
    answer = OpenAnswer(PLAIN, PrefillDone(uid=1, prompt_tokens=1, cached_tokens=0, text=None))
    for token_id in (0xC3, EOS):
        found = TokenLogprobs(uid=1, logprob=-0.5, top_ids=[], top_logprobs=[])
        answer.push(token_id, token_id != EOS, found)
    update = answer.take(Finished(uid=1, reason=FinishReason.STOP))
    assert update is not None
    assert (update.text, [entry.offset for entry in update.logprobs]) == ("\ufffd", [0, 1])


def test_token_that_ends_the_text_has_a_logprob_and_no_text() -> None:
    """lm-eval drops the last entry as the generated one, be it EOS or not."""
    answer = OpenAnswer(PLAIN, PrefillDone(uid=1, prompt_tokens=1, cached_tokens=0, text=None))
    answer.push(EOS, False, TokenLogprobs(uid=1, logprob=-0.5, top_ids=[], top_logprobs=[]))
    update = answer.take(Finished(uid=1, reason=FinishReason.STOP))
    assert update is not None
    assert (update.text, [entry.ends for entry in update.logprobs]) == ("", [True])
