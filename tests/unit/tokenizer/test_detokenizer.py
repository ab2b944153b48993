"""One update per req and step, one end per req, and nothing left behind."""

from hypothesis import given
from hypothesis import strategies as st

from minisgl.core import FinishReason
from minisgl.message.messages import Finished, PrefillDone, StepOutput, TextSpec, TextUpdate
from minisgl.tokenizer.detokenizer import Detokenizer
from tests.unit.tokenizer.test_stream import VOCABULARY, cut, ids_of


def opened(uid: int, stop: list[str] | None = None) -> PrefillDone:
    spec = TextSpec(prompt_tail=[], stop=stop or [])
    return PrefillDone(uid=uid, prompt_tokens=5, cached_tokens=3, text=spec)


def step(
    *tokens: tuple[int, int],
    opens: list[PrefillDone] | None = None,
    ends: dict[int, FinishReason] | None = None,
) -> StepOutput:
    return StepOutput(
        step_id=1,
        opened=opens or [],
        uids=[uid for uid, _ in tokens],
        token_ids=[token for _, token in tokens],
        finished=[Finished(uid=uid, reason=reason) for uid, reason in (ends or {}).items()],
    )


A, B, C = ids_of(b"abc")


def test_req_from_its_opening_to_its_end() -> None:
    detokenizer = Detokenizer(VOCABULARY)
    first = detokenizer.step(step((1, A), opens=[opened(1)])).updates
    last = detokenizer.step(step((1, B), ends={1: FinishReason.LENGTH})).updates
    assert [(u.text, u.completion_tokens, u.finish) for u in first + last] == [
        ("a", 1, None),
        ("b", 2, FinishReason.LENGTH),
    ]
    assert (last[0].prompt_tokens, last[0].cached_tokens) == (5, 3)
    assert not detokenizer._open


def test_token_that_ends_by_stop_is_not_text() -> None:
    detokenizer = Detokenizer(VOCABULARY)
    output = step((1, A), opens=[opened(1)], ends={1: FinishReason.STOP})
    (update,) = detokenizer.step(output).updates
    assert (update.text, update.completion_tokens, update.finish) == ("", 1, FinishReason.STOP)


def test_token_after_the_end_leaves_no_state() -> None:
    """W8b, W26: the overlapped step sends one more token; mini-sglang kept an entry for ever."""
    detokenizer = Detokenizer(VOCABULARY)
    detokenizer.step(step((1, A), opens=[opened(1)], ends={1: FinishReason.STOP}))
    assert detokenizer.step(step((1, B))).updates == []
    assert not detokenizer._open


def test_stop_string_ends_once_and_asks_for_the_abort() -> None:
    detokenizer = Detokenizer(VOCABULARY)
    (update,) = detokenizer.step(step((1, B), opens=[opened(1, ["b"])])).updates
    assert (update.text, update.finish, update.stopped) == ("", FinishReason.STOP, True)
    assert detokenizer.step(step((1, C))).updates == []
    assert detokenizer.step(step((1, C), ends={1: FinishReason.STOP})).updates == []
    assert not detokenizer._open


def test_stop_string_in_the_step_that_ends_needs_no_abort() -> None:
    detokenizer = Detokenizer(VOCABULARY)
    output = step((1, B), opens=[opened(1, ["b"])], ends={1: FinishReason.LENGTH})
    (update,) = detokenizer.step(output).updates
    assert (update.finish, update.stopped) == (FinishReason.STOP, False)


def test_end_without_any_token_is_told() -> None:
    detokenizer = Detokenizer(VOCABULARY)
    output = StepOutput(
        step_id=1,
        opened=[opened(1)],
        uids=[],
        token_ids=[],
        finished=[Finished(uid=1, reason=FinishReason.ERROR, error="no")],
    )
    (update,) = detokenizer.step(output).updates
    assert (update.finish, update.error) == (FinishReason.ERROR, "no")
    assert not detokenizer._open


@given(
    st.dictionaries(
        st.integers(1, 5), st.lists(st.sampled_from([A, B, C, *ids_of("€".encode())]), min_size=1)
    ),
    st.lists(st.sampled_from(["a", "bc", "cab", "€"]), max_size=2),
    st.randoms(use_true_random=False),
)
def test_interleaved_reqs_do_not_touch_each_other(reqs, stops, random) -> None:
    detokenizer = Detokenizer(VOCABULARY)
    updates: dict[int, list[TextUpdate]] = {uid: [] for uid in reqs}
    left = {uid: list(ids) for uid, ids in reqs.items()}
    seen: set[int] = set()
    while left:
        now = random.sample(sorted(left), random.randint(1, len(left)))
        opens = [opened(uid, stops) for uid in now if uid not in seen]
        seen.update(now)
        tokens = [(uid, left[uid].pop(0)) for uid in now]
        ends = {uid: FinishReason.LENGTH for uid in now if not left[uid]}
        for uid in ends:
            del left[uid]
        for update in detokenizer.step(step(*tokens, opens=opens, ends=ends)).updates:
            updates[update.uid].append(update)
    assert not detokenizer._open
    for uid, ids in reqs.items():
        text = VOCABULARY.decode(ids)
        assert "".join(u.text for u in updates[uid]) == cut(text, stops)
        assert [u.finish is not None for u in updates[uid]].count(True) == 1
        stopped = any(stop in text for stop in stops)
        assert (updates[uid][-1].finish is FinishReason.STOP) == stopped


def test_step_that_cannot_be_read_ends_its_reqs_and_no_others() -> None:
    """It was dropped with a log line, so that its clients waited for an end that never came."""
    detokenizer = Detokenizer(VOCABULARY)
    detokenizer.step(step((1, A), (2, A), (3, A), opens=[opened(1), opened(2), opened(3, ["a"])]))
    bad = step((2, B), (3, B), opens=[opened(4)])
    bad.token_ids.pop()
    failed = detokenizer.answer(bad)
    assert failed is not None
    assert [(u.uid, u.finish, u.stopped) for u in failed.updates] == [
        (2, FinishReason.ERROR, True),
        (4, FinishReason.ERROR, True),
    ], "3 has had its end at its stop string"
    late = PrefillDone(uid=5, prompt_tokens=1, cached_tokens=0, text=TextSpec(prompt_ids=b"\1\0\0"))
    failed = detokenizer.answer(step(opens=[late]))
    assert failed is not None
    assert [(u.uid, u.finish) for u in failed.updates] == [(5, FinishReason.ERROR)]
    (after,) = detokenizer.step(step((1, B), (2, C), ends={1: FinishReason.LENGTH})).updates
    assert (after.uid, after.text, after.finish) == (1, "b", FinishReason.LENGTH)
    assert detokenizer.answer(step()) is None
    assert not detokenizer._open
