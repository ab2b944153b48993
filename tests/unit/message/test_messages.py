"""Messages are equal after encoding and decoding, and other frames are refused.

The W-numbers are rows of docs/bugs.md.
"""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.core import FinishReason
from minisgl.message.messages import (
    DecodeIds,
    Finished,
    PrefillDone,
    StartText,
    StepOutput,
    StepText,
    TextOptions,
    TextUpdate,
    ToApi,
    ToDetokenizer,
    TokenizeChat,
    TokenizeResult,
    TokenizeText,
    TokenLogprob,
    TokenLogprobs,
    ToTokenizer,
)
from minisgl.message.queues import Receiver, Sender, endpoint


@pytest.mark.parametrize(
    ("message", "union"),
    [
        (TokenizeText(uid=1, text="é\0"), ToTokenizer),
        (TokenizeChat(uid=1, messages_json=b"[]"), ToTokenizer),
        (DecodeIds(uid=1, token_ids=b"\1\0\0\0"), ToTokenizer),
        (TokenizeResult(uid=1, error="no", internal=True), ToApi),
        (TokenizeResult(uid=1, text="x"), ToApi),
        (StartText(uid=1, options=TextOptions(stop=["é"], prompt_ids=b"\1\0\0\0")), ToDetokenizer),
        (
            StepOutput(
                step_id=1,
                prefill_done=[PrefillDone(uid=1, prompt_tokens=2, cached_tokens=0)],
                uids=[1],
                token_ids=[5],
                finished=[Finished(uid=1, reason=FinishReason.LENGTH)],
                logprobs=[
                    TokenLogprobs(
                        uid=1, position=2, logprobs=[-1], top_ids=[[5]], top_logprobs=[[-1]]
                    )
                ],
            ),
            ToDetokenizer,
        ),
        (
            StepText(
                updates=[
                    TextUpdate(
                        uid=2**62,
                        text="x",
                        completion_tokens=1,
                        prompt_tokens=2,
                        cached_tokens=0,
                        logprobs=[TokenLogprob(b"\xff", -1.0, 0, [(b"x", -2.0)])],
                    )
                ]
            ),
            ToApi,
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_round_trip(message: object, union: object) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=union) == message


@given(st.binary(max_size=40))
def test_garbage_is_no_message(frame: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
        msgspec.msgpack.decode(frame, type=ToApi)


def test_unknown_fields_and_foreign_types_are_refused() -> None:
    """W35: mini-sglang built any class that a message named."""
    for value in (
        {"type": "TokenizeResult", "uid": 1, "text": "", "more": 1},
        {"type": "TextOptions", "prompt_tail": []},
        {"__type__": "TokenizeResult", "uid": 1, "text": ""},
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=ToApi)
    assert TextOptions(prompt_tail=[]).min_tokens == 0


def test_receiver_drops_garbage_and_goes_on(tmp_path: Path) -> None:
    receiver: Receiver[ToApi] = Receiver(endpoint(str(tmp_path), "q"), ToApi)
    raw: Sender[object] = Sender(endpoint(str(tmp_path), "q"))
    raw.send({"no": "message"})
    raw.send(TokenizeResult(uid=7, text="x"))
    seen: list[ToApi] = []
    while not seen:
        assert receiver.poll(10)
        seen += receiver.drain()
    assert seen == [TokenizeResult(uid=7, text="x")]
    raw.close()
    receiver.close()
