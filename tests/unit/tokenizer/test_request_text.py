"""RequestText: the text, reasoning, ids and log-probabilities up to a stop string."""

import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.core import FinishReason
from minisgl.message.messages import (
    Finished,
    PrefillDone,
    TextOptions,
    TextUpdate,
    TokenLogprobs,
)
from minisgl.tokenizer.request_text import RequestText
from minisgl.tokenizer.vocab import Vocabulary

BEGIN, END, EOS = 256, 257, 258
TABLE = [bytes([byte]) for byte in range(256)] + [b"<think>", b"</think>", b"<eos>"]
THINKS = Vocabulary(TABLE, frozenset({EOS}), (BEGIN, END))
PLAIN = Vocabulary(TABLE, frozenset({EOS}))


DONE = PrefillDone(uid=1, prompt_tokens=1, cached_tokens=0)


def one_token(top_ids: list[int]) -> TokenLogprobs:
    """The log-probability of one output token; the same for each of the most likely ids."""
    return TokenLogprobs(
        uid=1, position=1, logprobs=[-0.5], top_ids=[top_ids], top_logprobs=[[-0.5] * len(top_ids)]
    )


def all_updates(
    vocabulary: Vocabulary, tokens: list[int], options: TextOptions, one_by_one: bool = True
) -> list[TextUpdate]:
    """The updates of a request with these tokens, taken after each token or all at its end."""
    text = RequestText(vocabulary, options, DONE)
    updates = []
    for token_id in tokens:
        text.push(token_id, True, one_token([token_id]))
        if one_by_one or text.stream.stopped:
            updates.append(text.take(None))
        if text.stream.stopped:
            break
    else:
        updates.append(text.take(Finished(uid=1, reason=FinishReason.LENGTH)))
    return [update for update in updates if update is not None]


def texts(updates: list[TextUpdate]) -> tuple[str, str]:
    return "".join(u.reasoning for u in updates), "".join(u.text for u in updates)


def test_reasoning_is_separated_whether_it_begins_in_prompt_or_output() -> None:
    tokens = [*b"\nwhy", END, *b"\n\nyes\n"]
    begun = all_updates(THINKS, tokens, TextOptions(prompt_tail=[BEGIN, 10], reasoning=True))
    assert texts(begun) == ("why", "yes\n")
    assert begun[-1].reasoning_tokens == 4
    assert begun[-1].completion_tokens == len(tokens)
    own = all_updates(THINKS, [BEGIN, *tokens], TextOptions(prompt_tail=[], reasoning=True))
    assert texts(own) == ("why", "yes\n")
    ended = all_updates(
        THINKS, [*b"yes"], TextOptions(prompt_tail=[BEGIN, 10, END, 10], reasoning=True)
    )
    assert texts(ended) == ("", "yes")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([BEGIN, *b"thought\nwhy", END, *b"\nyes"], ("why", "yes")),
        ([BEGIN, *b"thought\n", END, *b"yes"], ("", "yes")),
        ([BEGIN, *b"though", END, *b"yes"], ("", "yes")),
        ([BEGIN, *b"those", END, *b"thought"], ("those", "thought")),
    ],
)
def test_the_name_of_the_thinking_is_no_reasoning(
    answer: list[int], expected: tuple[str, str]
) -> None:
    named = Vocabulary(TABLE, frozenset({EOS}), (BEGIN, END), "thought")
    assert texts(all_updates(named, answer, TextOptions(reasoning=True))) == expected


def test_reasoning_stays_text_when_not_wanted_or_not_known() -> None:
    tokens = [BEGIN, *b"a", END, *b"b"]
    for vocabulary, options in [
        (THINKS, TextOptions(prompt_tail=[])),
        (PLAIN, TextOptions(prompt_tail=[], reasoning=True)),
    ]:
        assert texts(all_updates(vocabulary, tokens, options)) == ("", "<think>a</think>b")


def test_text_withheld_for_a_stop_string_stays_reasoning() -> None:
    options = TextOptions(prompt_tail=[BEGIN], stop=["xy"], reasoning=True)
    assert texts(all_updates(THINKS, [*b"ax", END, *b"yb"], options)) == ("ax", "yb")


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
def test_logprobs_are_reported_for_the_tokens_whose_text_is_reported(
    tokens: list[int], stops: list[str], include_stop: bool, one_by_one: bool
) -> None:
    options = TextOptions(prompt_tail=[], stop=stops, include_stop=include_stop)
    updates = all_updates(PLAIN, tokens, options, one_by_one)
    entries = [entry for update in updates for entry in update.logprobs]
    text = texts(updates)[1]
    kept = b"".join(entry.token_bytes for entry in entries).decode("utf-8", "replace")
    assert kept == text
    # Each byte belongs to the last character of the bytes up to it, complete or not.
    data = bytes(tokens)
    ends = [len(data[: index + 1].decode("utf-8", "replace")) for index in range(len(entries))]
    assert [entry.offset for entry in entries] == [end - 1 for end in ends]
    seen = 0
    # No log-probability is reported before the first character of its token.
    for update in updates:
        seen += len(update.text)
        assert all(entry.offset < seen for entry in update.logprobs)


def test_silent_request_reports_its_prompt_only() -> None:
    ids = [*"é!".encode()]
    options = TextOptions(prompt_tail=[], prompt_ids=array.array("i", ids).tobytes(), silent=True)
    text = RequestText(PLAIN, options, DONE)
    text.push_prompt(
        TokenLogprobs(
            uid=1,
            position=1,
            logprobs=[-1.0, -2.0],
            top_ids=[[65], [66]],
            top_logprobs=[[-0.1], [-0.2]],
        )
    )
    text.push(65, True, None)
    update = text.take(Finished(uid=1, reason=FinishReason.STOP))
    assert update is not None
    assert (update.text, update.completion_tokens, update.finish) == ("", 0, FinishReason.LENGTH)
    assert [(e.logprob, e.offset) for e in update.prompt_logprobs] == [(None, 0), (-1, 0), (-2, 1)]
    assert update.prompt_logprobs[1].top == [(b"A", -0.1)]


@pytest.mark.parametrize(
    ("next_byte", "offset"), [(0xA9, 1), (65, 2)], ids=["continues", "does not"]
)
def test_offset_after_a_prompt_that_ends_within_a_character(next_byte: int, offset: int) -> None:
    """The echo shows U+FFFD; the answer begins with the whole character, or with U+FFFD again."""
    ids = [0xC3]
    options = TextOptions(prompt_tail=ids, prompt_ids=array.array("i", ids).tobytes())
    (update,) = all_updates(PLAIN, [next_byte, 65], options, one_by_one=False)
    text = PLAIN.decode(ids) + update.text
    assert [text[entry.offset] for entry in update.logprobs] == [text[offset], "A"]
    assert [entry.offset for entry in update.logprobs] == [offset, offset + 1]


def test_stop_token_after_an_incomplete_character_has_the_next_offset() -> None:
    text = RequestText(PLAIN, TextOptions(), DONE)
    for token_id in (0xC3, EOS):
        text.push(token_id, token_id != EOS, one_token([]))
    update = text.take(Finished(uid=1, reason=FinishReason.STOP))
    assert update is not None
    assert (update.text, [entry.offset for entry in update.logprobs]) == ("\ufffd", [0, 1])


def test_token_that_ends_the_text_has_a_logprob_and_no_text() -> None:
    """lm-eval always drops the last entry, because it expects the generated token there."""
    text = RequestText(PLAIN, TextOptions(), DONE)
    text.push(EOS, False, one_token([]))
    update = text.take(Finished(uid=1, reason=FinishReason.STOP))
    assert update is not None
    assert (update.text, [entry.ends for entry in update.logprobs]) == ("", [True])
