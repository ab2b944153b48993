"""The pieces of a stream join to the text of all tokens, cut at the first stop string.

The W-numbers are rows of docs/bugs.md.
"""

from hypothesis import example, given
from hypothesis import strategies as st

from minisgl.message.messages import TextOptions
from minisgl.tokenizer.text_stream import StopMatcher, TextStream
from minisgl.tokenizer.vocab import Vocabulary
from tests.unit.tokenizer.conftest import byte_level

TOKENIZER = byte_level()
VOCABULARY = Vocabulary.of(TOKENIZER)
IDS = st.lists(st.integers(0, TOKENIZER.get_vocab_size() + 3), max_size=40)
EURO = "€".encode()


def ids_of(data: bytes) -> list[int]:
    return [
        next(i for i in range(256) if VOCABULARY.token_bytes(i) == bytes([byte])) for byte in data
    ]


def streamed(stream: TextStream, ids: list[int]) -> list[str]:
    return [*(stream.push([token_id]) for token_id in ids), stream.finish()]


def cut(text: str, stops: list[str]) -> str:
    """The text, cut at the stop string that ends first; of equal ends the longer string counts."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@given(IDS)
@example(ids_of(b"ok \xf0\x9f"))  # The length limit falls inside a character.
@example(ids_of(b"\xff" * 9 + b"a"))
def test_pieces_join_to_the_decoded_whole(ids: list[int]) -> None:
    """mini-sglang dropped the tail when the text ended within a character."""
    pieces = streamed(TextStream(VOCABULARY, TextOptions()), ids)
    assert "".join(pieces) == VOCABULARY.decode(ids)


@given(IDS)
def test_at_most_one_incomplete_character_is_withheld(ids: list[int]) -> None:
    stream = TextStream(VOCABULARY, TextOptions())
    sent = ""
    for count, token_id in enumerate(ids, 1):
        sent += stream.push([token_id])
        data = b"".join(VOCABULARY.token_bytes(i) for i in ids[:count])
        # b"\xed\xa0" alone reads as two bad characters, but the decoder waits for its third byte.
        assert len(data.decode("utf-8", "replace")) - len(sent) <= 2


@given(
    st.lists(st.sampled_from("ab€"), max_size=30).map("".join),
    st.lists(st.text("ab€", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(1, 4), min_size=1, max_size=30),
)
@example("aab", ["aab", "ab"], [1])
@example("aaab", ["aab"], [1])
def test_stop_strings_cut_the_same_for_every_chunking(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    matcher = StopMatcher(stops)
    sent, position, turn = "", 0, 0
    while position < len(text) and not matcher.stopped:
        size = sizes[turn % len(sizes)]
        sent += matcher.feed(text[position : position + size])
        # No text is sent that a stop string could still cut off.
        assert cut(text, stops).startswith(sent)
        position += size
        turn += 1
    sent += matcher.flush()
    assert sent == cut(text, stops)
    assert matcher.stopped == any(stop in text for stop in stops)


def test_text_that_resembles_no_stop_string_is_not_withheld() -> None:
    matcher = StopMatcher(["###END OF ANSWER###"])
    assert matcher.feed("hello") == "hello"
    assert matcher.feed(" ##") == " "
    assert matcher.feed("no") == "##no"


def test_stop_string_across_tokens_and_inside_characters() -> None:
    """The stop string begins within a token and ends with the last byte of a character."""
    stream = TextStream(VOCABULARY, TextOptions(stop=["l€"]))
    assert streamed(stream, ids_of(b"hel" + EURO + b"more")) == [
        "h",
        "e",
        "",
        "",
        "",
        "",
        *[""] * 5,
    ]
    assert stream.stopped
    assert stream.tokens == 6, "tokens after the completing one do not count"


def test_include_stop_keeps_the_stop_string() -> None:
    stream = TextStream(VOCABULARY, TextOptions(stop=["b"], include_stop=True))
    assert "".join(streamed(stream, ids_of(b"abc"))) == "ab"


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    stream = TextStream(VOCABULARY, TextOptions(stop=["a"], min_tokens=3))
    assert "".join(streamed(stream, ids_of(b"abca"))) == "abc"


def test_character_that_begins_in_the_prompt_comes_out_whole() -> None:
    head, tail = ids_of(EURO[:2]), ids_of(EURO[2:] + b"!")
    assert "".join(streamed(TextStream(VOCABULARY, TextOptions(prompt_tail=head)), tail)) == "€!"


def test_terminating_token_counts_but_is_not_text() -> None:
    stream = TextStream(VOCABULARY, TextOptions())
    stream.push(ids_of(b"a"))
    assert stream.push(ids_of(b"b"), is_text=False) == ""
    assert (stream.tokens, stream.finish()) == (2, "")
