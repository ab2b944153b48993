"""Messages are equal after encoding and decoding, and other frames are refused.

The W-numbers are rows of docs/bugs.md.
"""

from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from minisgl.core import FinishReason, SamplingParams
from minisgl.message.messages import (
    AddReq,
    DecodeIds,
    Finished,
    PrefillDone,
    PromptImage,
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
    ToScheduler,
    ToTokenizer,
)
from minisgl.message.queues import Receiver, Sender, endpoint
from minisgl.utils.process import SOCKET_KEY, socket_folder, write_socket_key


@pytest.mark.parametrize(
    ("message", "union"),
    [
        (TokenizeText(uid=1, text="é\0"), ToTokenizer),
        (TokenizeChat(uid=1, messages_json=b"[]"), ToTokenizer),
        (DecodeIds(uid=1, token_ids=b"\1\0\0\0"), ToTokenizer),
        (
            AddReq(
                uid=1,
                token_ids=b"\xfe\xff\xff\xff",
                sampling=SamplingParams(),
                images=(PromptImage(start=0, grid=(2, 2), digest=b"\1", pixels=b"\0\xff"),),
            ),
            ToScheduler,
        ),
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
    """mini-sglang built any class that a message named."""
    for value in (
        {"type": "TokenizeResult", "uid": 1, "text": "", "more": 1},
        {"type": "TextOptions", "prompt_tail": []},
        {"__type__": "TokenizeResult", "uid": 1, "text": ""},
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=ToApi)
    assert TextOptions(prompt_tail=[]).min_tokens == 0


def test_receiver_drops_garbage_and_goes_on(tmp_path: Path) -> None:
    write_socket_key(tmp_path)
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


def test_receiver_drops_parameters_out_of_range_and_goes_on(tmp_path: Path) -> None:
    """The constructor of SamplingParams raises InvalidRequest, also in the decoder."""
    write_socket_key(tmp_path)
    receiver: Receiver[AddReq] = Receiver(endpoint(str(tmp_path), "q"), AddReq)
    raw: Sender[object] = Sender(endpoint(str(tmp_path), "q"))
    good = AddReq(uid=7, token_ids=b"", sampling=SamplingParams())
    bad = msgspec.to_builtins(good) | {"uid": 6, "token_ids": b"", "sampling": {"max_tokens": -1}}
    raw.send(bad)
    raw.send(good)
    seen: list[AddReq] = []
    while not seen:
        assert receiver.poll(10)
        seen += receiver.drain()
    assert seen == [good]
    raw.close()
    receiver.close()


def test_receiver_drops_messages_without_the_key_of_its_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: a well-formed message of another process ended the receiver."""
    write_socket_key(tmp_path)
    (tmp_path / "other").mkdir()
    write_socket_key(tmp_path / "other")
    address = endpoint(str(tmp_path), "q")
    receiver: Receiver[ToApi] = Receiver(address, ToApi)
    ours: Sender[ToApi] = Sender(address)
    foreign = zmq.Context.instance().socket(zmq.PUSH)
    foreign.connect(address)
    message = TokenizeResult(uid=1, text="foreign")
    encoded = msgspec.msgpack.encode(message)
    key = (tmp_path / "other" / SOCKET_KEY).read_bytes()
    for frame in (b"", encoded, b"\0" * len(key), key, key + encoded):
        foreign.send(frame)
    foreign.close()
    for uid in range(3):
        ours.send(TokenizeResult(uid=uid, text="ours"))
    seen: list[ToApi] = []
    dropped = 0
    while len(seen) < 3 or dropped < 5:
        assert receiver.poll(10)
        seen += receiver.drain()
        dropped = caplog.text.count("foreign message dropped")
    assert seen == [TokenizeResult(uid=uid, text="ours") for uid in range(3)]
    ours.close()
    receiver.close()


@given(st.lists(st.integers(0, 3000), max_size=8))
def test_long_and_short_messages_arrive_whole(sizes: list[int]) -> None:
    """A sender encodes each message into the memory of the message before."""
    with socket_folder() as folder:
        receiver: Receiver[ToApi] = Receiver(endpoint(folder, "q"), ToApi)
        sender: Sender[ToApi] = Sender(endpoint(folder, "q"))
        sent = [TokenizeResult(uid=i, text="x" * size) for i, size in enumerate(sizes)]
        for message in sent:
            sender.send(message)
        seen: list[ToApi] = []
        while len(seen) < len(sent):
            assert receiver.poll(10)
            seen += receiver.drain()
        assert seen == sent
        sender.close()
        receiver.close()
