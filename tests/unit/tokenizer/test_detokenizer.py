"""Detokenizer: one update per request and step, one end per request, and no state left behind.

The W-numbers are rows of docs/bugs.md.
"""

from unittest.mock import Mock

from hypothesis import given
from hypothesis import strategies as st

from minisgl.core import FinishReason
from minisgl.message.messages import (
    Finished,
    PrefillDone,
    StartText,
    StepOutput,
    TextOptions,
    TextUpdate,
    ToolOptions,
)
from minisgl.tokenizer.detokenizer import Detokenizer
from tests.unit.tokenizer.test_text_stream import VOCABULARY, cut, ids_of


def start(detokenizer: Detokenizer, *uids: int, stop: list[str] | None = None) -> None:
    """Send the StartText of each request, as the API server does before the AddReq."""
    for uid in uids:
        options = TextOptions(prompt_tail=[], stop=stop or [])
        assert detokenizer.handle(StartText(uid=uid, options=options)) is None


def done(uid: int) -> PrefillDone:
    return PrefillDone(uid=uid, prompt_tokens=5, cached_tokens=3)


def updates_of(detokenizer: Detokenizer, message: StartText | StepOutput) -> list[TextUpdate]:
    text = detokenizer.handle(message)
    assert text is None or text.updates, "a message without updates is not sent"
    return [] if text is None else text.updates


def is_empty(detokenizer: Detokenizer) -> bool:
    return not (detokenizer._open or detokenizer._options or detokenizer._waiting)


def step(
    *tokens: tuple[int, int],
    opens: tuple[int, ...] = (),
    ends: dict[int, FinishReason] | None = None,
) -> StepOutput:
    return StepOutput(
        step_id=1,
        prefill_done=[done(uid) for uid in opens],
        uids=[uid for uid, _ in tokens],
        token_ids=[token for _, token in tokens],
        finished=[Finished(uid=uid, reason=reason) for uid, reason in (ends or {}).items()],
    )


A, B, C = ids_of(b"abc")


def test_request_from_its_first_token_to_its_last() -> None:
    detokenizer = Detokenizer(VOCABULARY)
    start(detokenizer, 1)
    first = updates_of(detokenizer, step((1, A), opens=(1,)))
    last = updates_of(detokenizer, step((1, B), ends={1: FinishReason.LENGTH}))
    assert [(u.text, u.completion_tokens, u.finish) for u in first + last] == [
        ("a", 1, None),
        ("b", 2, FinishReason.LENGTH),
    ]
    assert (last[0].prompt_tokens, last[0].cached_tokens) == (5, 3)
    assert is_empty(detokenizer)


def test_outputs_wait_for_the_text_options_of_their_request() -> None:
    """The API server and the scheduler send by two queues, between which no order is defined."""
    detokenizer = Detokenizer(VOCABULARY)
    start(detokenizer, 1)
    updates_of(detokenizer, step((1, A), opens=(1,)))
    assert updates_of(detokenizer, step((1, A), (2, A), opens=(2,))) == []
    assert updates_of(detokenizer, step((2, B), (1, B), ends={1: FinishReason.LENGTH})) == []
    assert updates_of(detokenizer, StartText(uid=3, options=TextOptions())) == []
    options = TextOptions(stop=["b"])
    found = updates_of(detokenizer, StartText(uid=2, options=options))
    assert [(u.uid, u.text, u.finish) for u in found] == [
        (1, "a", None),
        (2, "a", None),
        (2, "", FinishReason.STOP),
        (1, "b", FinishReason.LENGTH),
    ]
    assert updates_of(detokenizer, step(ends={2: FinishReason.STOP})) == []
    refused = updates_of(detokenizer, step(opens=(3,), ends={3: FinishReason.ERROR}))
    assert [(u.uid, u.finish) for u in refused] == [(3, FinishReason.ERROR)]
    assert is_empty(detokenizer)


def test_stop_token_is_not_text() -> None:
    detokenizer = Detokenizer(VOCABULARY)
    start(detokenizer, 1)
    output = step((1, A), opens=(1,), ends={1: FinishReason.STOP})
    (update,) = updates_of(detokenizer, output)
    assert (update.text, update.completion_tokens, update.finish) == ("", 1, FinishReason.STOP)


def test_token_after_the_end_leaves_no_state() -> None:
    """The overlapped step sends one more token; mini-sglang kept an entry forever."""
    detokenizer = Detokenizer(VOCABULARY)
    start(detokenizer, 1)
    updates_of(detokenizer, step((1, A), opens=(1,), ends={1: FinishReason.STOP}))
    assert updates_of(detokenizer, step((1, B))) == []
    assert is_empty(detokenizer)


def test_stop_string_ends_once_and_asks_for_the_abort() -> None:
    detokenizer = Detokenizer(VOCABULARY)
    start(detokenizer, 1, stop=["b"])
    (update,) = updates_of(detokenizer, step((1, B), opens=(1,)))
    assert (update.text, update.finish, update.stopped) == ("", FinishReason.STOP, True)
    assert updates_of(detokenizer, step((1, C))) == []
    assert updates_of(detokenizer, step((1, C), ends={1: FinishReason.STOP})) == []
    assert is_empty(detokenizer)


def test_accepted_tokens_of_a_prediction_are_summed_up_to_the_stop_string() -> None:
    detokenizer = Detokenizer(VOCABULARY)
    start(detokenizer, 7, stop=["bc"])
    opened = PrefillDone(uid=7, prompt_tokens=5, cached_tokens=3, prediction_tokens=9)
    first = StepOutput(
        step_id=1, prefill_done=[opened], uids=[7, 7], token_ids=[A, A], predicted=[(7, 1)]
    )
    second = StepOutput(step_id=2, uids=[7] * 5, token_ids=[A, B, C, A, A], predicted=[(7, 5)])
    counted = []
    for output in (first, second):
        (update,) = updates_of(detokenizer, output)
        counted.append((update.prediction_tokens, update.accepted_prediction_tokens))
    assert update.finish is FinishReason.STOP
    assert update.completion_tokens == 5
    assert counted == [(9, 1), (9, 4)]


def test_stop_string_in_the_last_step_needs_no_abort() -> None:
    detokenizer = Detokenizer(VOCABULARY)
    start(detokenizer, 1, stop=["b"])
    output = step((1, B), opens=(1,), ends={1: FinishReason.LENGTH})
    (update,) = updates_of(detokenizer, output)
    assert (update.finish, update.stopped) == (FinishReason.STOP, False)


def test_end_without_any_token_is_reported() -> None:
    detokenizer = Detokenizer(VOCABULARY)
    start(detokenizer, 1)
    output = StepOutput(
        step_id=1,
        prefill_done=[done(1)],
        finished=[Finished(uid=1, reason=FinishReason.ERROR, error="no")],
    )
    (update,) = updates_of(detokenizer, output)
    assert (update.finish, update.error) == (FinishReason.ERROR, "no")
    assert is_empty(detokenizer)


@given(
    st.dictionaries(
        st.integers(1, 5), st.lists(st.sampled_from([A, B, C, *ids_of("€".encode())]), min_size=1)
    ),
    st.lists(st.sampled_from(["a", "bc", "cab", "€"]), max_size=2),
    st.randoms(use_true_random=False),
)
def test_interleaved_requests_do_not_affect_each_other(requests, stops, random) -> None:
    """The time at which the text options of a request arrive has no effect either."""
    detokenizer = Detokenizer(VOCABULARY)
    updates: dict[int, list[TextUpdate]] = {uid: [] for uid in requests}
    left = {uid: list(ids) for uid, ids in requests.items()}
    options = TextOptions(stop=stops)
    messages: list[StartText | StepOutput] = []
    seen: set[int] = set()
    while left:
        now = random.sample(sorted(left), random.randint(1, len(left)))
        opens = tuple(uid for uid in now if uid not in seen)
        seen.update(now)
        tokens = [(uid, left[uid].pop(0)) for uid in now]
        ends = {uid: FinishReason.LENGTH for uid in now if not left[uid]}
        for uid in ends:
            del left[uid]
        messages.append(step(*tokens, opens=opens, ends=ends))
    for uid in requests:
        start_text = StartText(uid=uid, options=options)
        messages.insert(random.randint(0, len(messages)), start_text)
    for message in messages:
        for update in updates_of(detokenizer, message):
            updates[update.uid].append(update)
    assert is_empty(detokenizer)
    for uid, ids in requests.items():
        text = VOCABULARY.decode(ids)
        assert "".join(u.text for u in updates[uid]) == cut(text, stops)
        assert [u.finish is not None for u in updates[uid]].count(True) == 1
        stopped = any(stop in text for stop in stops)
        assert (updates[uid][-1].finish is FinishReason.STOP) == stopped


def test_step_that_cannot_be_applied_ends_its_requests_and_no_others() -> None:
    """Regression: the detokenizer dropped the step, and its clients waited forever."""
    detokenizer = Detokenizer(VOCABULARY)
    start(detokenizer, 1, 2, 4)
    start(detokenizer, 3, stop=["a"])
    updates_of(detokenizer, step((1, A), (2, A), (3, A), opens=(1, 2, 3)))
    bad = step((2, B), (3, B), opens=(4,))
    bad.token_ids.pop()
    failed = updates_of(detokenizer, bad)
    assert [(u.uid, u.finish, u.stopped) for u in failed] == [
        (2, FinishReason.ERROR, True),
        (4, FinishReason.ERROR, True),
    ], "3 has had its end at its stop string"
    updates_of(detokenizer, StartText(uid=5, options=TextOptions(prompt_ids=b"\1\0\0")))
    failed = updates_of(detokenizer, step(opens=(5,)))
    assert [(u.uid, u.finish) for u in failed] == [(5, FinishReason.ERROR)]
    (after,) = updates_of(detokenizer, step((1, B), (2, C), ends={1: FinishReason.LENGTH}))
    assert (after.uid, after.text, after.finish) == (1, "b", FinishReason.LENGTH)
    assert updates_of(detokenizer, step()) == []
    assert is_empty(detokenizer)


def test_bug_of_a_parser_ends_the_requests_of_its_step_and_no_others() -> None:
    """Regression: such a bug ended the process, and the service with it."""
    parser = Mock(marker_ids={}, has_sections=False, in_reasoning=False)
    parser.feed.side_effect = RecursionError
    detokenizer = Detokenizer(VOCABULARY, lambda tools: parser)
    start(detokenizer, 1)
    options = TextOptions(prompt_tail=[], tools=ToolOptions(format="hermes", parameters={}))
    updates_of(detokenizer, StartText(uid=2, options=options))
    updates_of(detokenizer, step((1, A), opens=(1,)))
    (failed,) = updates_of(detokenizer, step((2, A), opens=(2,)))
    assert (failed.uid, failed.finish) == (2, FinishReason.ERROR)
    (after,) = updates_of(detokenizer, step((1, B), ends={1: FinishReason.LENGTH}))
    assert (after.uid, after.text) == (1, "b")
    assert is_empty(detokenizer)


def test_text_at_the_end_is_one_update_with_all_tokens() -> None:
    """A program that reads no text before the end pays nothing for text at each token."""
    detokenizer = Detokenizer(VOCABULARY)
    options = TextOptions(token_ids=True, at_end=True)
    assert detokenizer.handle(StartText(uid=1, options=options)) is None
    assert updates_of(detokenizer, step((1, A), opens=(1,))) == []
    assert updates_of(detokenizer, step((1, B))) == []
    (update,) = updates_of(detokenizer, step((1, C), ends={1: FinishReason.STOP}))
    assert (update.text, update.token_ids, update.completion_tokens) == ("ab", [A, B, C], 3)
    assert (update.finish, update.prompt_tokens) == (FinishReason.STOP, 5)
    assert is_empty(detokenizer)
