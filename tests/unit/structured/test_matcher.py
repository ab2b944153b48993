"""The state of one grammar: thinking, ends of the output, forced tokens and failures."""

import json
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import tokenizers
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from minisgl.core import Grammar, GrammarFailed, InvalidRequest, SamplingParams
from minisgl.demo import model_path
from minisgl.message.stats import ConstraintTotals
from minisgl.structured.library import compile_grammar, load_tokenizer
from minisgl.structured.matcher import Compiled, GrammarState, allows

EOS, THINK, THOUGHT, STOP, TRIGGER = 0, 1, 2, 3, 4
PROMPT = 10  # tokens of the prompt
AMBIGUOUS = "start: e\ne: e e e | e e | /[a-z ]/"
TOKENIZER = tokenizers.Tokenizer.from_file(str(model_path() / "tokenizer.json"))


@pytest.fixture(scope="module")
def library() -> LLTokenizer:
    return load_tokenizer(str(model_path()), (EOS,))


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


class Output:
    """The output of one request, driven token by token."""

    def __init__(self, library: LLTokenizer, source: str, thinking: Any = "off", **params: Any):
        grammar = Grammar(
            source=source,
            kind=params.pop("kind", "regex"),
            thinking=thinking,
            think_start=THINK,
            think_end=THOUGHT,
            trigger=params.pop("trigger", -1),
        )
        compiled: Future[Compiled] = Future()
        compiled.set_result(Compiled(compile_grammar(library, grammar), 0.001))
        self.totals = ConstraintTotals()
        sampling = SamplingParams(grammar=grammar, **params)
        common = (EOS,), self.totals, self.prepare
        self.state = GrammarState(sampling, grammar, lambda *_: compiled, *common)
        self.state.start("")
        assert self.state.prepared()
        assert self.state.unseen(PROMPT, PROMPT) == 0
        self.tokens = [0] * PROMPT
        self.words = -(-library.vocab_size // 32)
        self.library = library

    def prepare(self, state: GrammarState, tokens: list[int]) -> Future[float]:
        future: Future[float] = Future()
        future.set_result(state.compute_ahead(tokens, self.library))
        return future

    def allowed(self) -> set[int]:
        """Return the ids that may come next."""
        mask = np.zeros(self.words, dtype=np.int32)
        if self.state.masked_by_grammar:
            self.state.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.state.complete(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits).tolist())

    def add(self, *tokens: int) -> "Output":
        for token in tokens:
            assert token in self.allowed()
            self.state.follow([token])
            self.tokens.append(token)
        return self

    @property
    def position(self) -> int:
        return len(self.tokens)

    def forced(self, *tokens: int) -> list[int]:
        """Return the ids that must follow `tokens`, which the state has not seen."""
        return list(self.state.forced(np.array([*self.tokens, *tokens], dtype=np.int32)))


def regex(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


def test_an_eos_id_is_allowed_only_where_the_text_is_complete(library: LLTokenizer) -> None:
    output = Output(library, regex("ab*"))
    assert EOS not in output.allowed()
    output.add(*ids("a"))
    assert EOS in output.allowed()
    assert len(output.allowed()) > 1
    assert output.add(*ids("b")).forced() == []


def test_a_text_that_cannot_go_on_forces_an_eos_id(library: LLTokenizer) -> None:
    output = Output(library, regex("[ab]"))
    output.add(*ids("a"))
    assert output.allowed() == {EOS}
    assert output.forced() == [EOS]


def test_forced_tokens_follow_a_token_that_the_state_has_not_seen(library: LLTokenizer) -> None:
    output = Output(library, regex("[ab]ccc and more of the same (x|y)"))
    first = ids("a")[0]
    forced = output.forced(first)
    assert TOKENIZER.decode(forced).startswith("ccc and more of the same")
    assert output.state.unseen(PROMPT + 1, PROMPT) == 0
    assert output.forced(first) == forced, "asking changes nothing"
    output.state.follow(forced)
    assert output.state.unseen(PROMPT + 1 + len(forced), PROMPT) == 0


def test_open_thinking_is_free_until_its_end(library: LLTokenizer) -> None:
    output = Output(library, regex("[0-9]"), thinking="open")
    everything = output.allowed()
    assert EOS not in everything, "an output that ends inside its thinking has no answer"
    assert {*ids("any text"), THINK} <= everything
    output.add(*ids("any text"))
    assert output.forced() == []
    output.add(THOUGHT)
    assert THOUGHT not in output.allowed()
    assert set(ids("7")) <= output.allowed()
    assert not set(ids("any")) & output.allowed()


def test_allowed_thinking_begins_only_with_the_first_token(library: LLTokenizer) -> None:
    answers = Output(library, regex("[0-9]{2}"), thinking="allowed")
    assert THINK in answers.allowed()
    assert set(ids("7")) <= answers.allowed()
    assert THINK not in answers.add(*ids("7")).allowed()
    thinks = Output(library, regex("[0-9]{2}"), thinking="allowed")
    thinks.add(THINK, *ids("any text"), THOUGHT)
    assert THINK not in thinks.allowed()
    thinks.add(*ids("7"), *ids("8"), EOS)
    assert THINK not in Output(library, regex("[0-9]{2}")).allowed()


@pytest.mark.parametrize("thinking", ["off", "allowed", "open"])
def test_a_trigger_begins_the_grammar_after_free_text(library: LLTokenizer, thinking: str) -> None:
    output = Output(library, regex("ab"), thinking, trigger=TRIGGER)
    everything = set(range(library.vocab_size))
    if thinking == "allowed":
        output.add(THINK)
    if thinking != "off":
        output.add(TRIGGER)  # Thinking has no calls.
        assert EOS not in output.allowed()
        output.add(THOUGHT)
    assert everything <= output.allowed(), "free text may end"
    output.add(*ids("free text"), TRIGGER)
    assert EOS not in output.allowed()
    assert len(output.allowed()) < 10
    output.add(*ids("ab"))
    assert output.allowed() == {EOS}


def test_a_stop_token_id_ends_only_a_complete_text(library: LLTokenizer) -> None:
    output = Output(library, regex("ab"), stop_token_ids=(STOP, *ids("b")))
    assert STOP not in output.allowed()
    assert ids("b")[0] not in output.forced(ids("a")[0])
    complete = Output(library, regex("a"), stop_token_ids=(STOP,)).add(*ids("a"))
    assert complete.allowed() == {EOS, STOP}


def test_a_stop_token_id_that_the_text_needs_is_an_error(library: LLTokenizer) -> None:
    output = Output(library, regex("[a]q"), stop_token_ids=tuple(ids("q")))
    output.add(*ids("a"))
    assert output.allowed() == set()
    failure = output.state.failure(output.position)
    assert isinstance(failure, GrammarFailed)
    assert "stop_token_ids" in failure.message


def test_min_tokens_forbids_the_end_and_may_leave_no_token(library: LLTokenizer) -> None:
    longer = Output(library, regex("a+"), min_tokens=3).add(*ids("a"))
    assert EOS not in longer.allowed()
    assert longer.allowed()
    output = Output(library, regex("[ab]"), min_tokens=3).add(*ids("a"))
    assert output.state.failure(output.position) is None
    assert output.allowed() == set()
    assert output.forced() == []
    failure = output.state.failure(output.position)
    assert failure is not None
    assert "min_tokens=3" in failure.message
    assert output.state.failure(output.position + 1) is None, "another fault at that position"


def test_ignore_eos_forbids_an_eos_id_while_the_text_can_go_on(library: LLTokenizer) -> None:
    output = Output(library, regex("a{1,2}"), ignore_eos=True).add(ids("a")[0])
    assert EOS not in output.allowed()
    output.add(ids("a")[0])
    assert output.allowed() == {EOS}


def test_a_request_that_exceeds_its_work_fails_at_that_token(library: LLTokenizer) -> None:
    """The rows of an ambiguous grammar grow with the text, and their time by the third power."""
    source = LLMatcher.grammar_from_lark(AMBIGUOUS)
    output = Output(library, source, kind="grammar")
    letter = ids("a")[0]
    while letter in output.allowed() and output.position < 100:
        output.add(letter)
    # The longest row has 250 items. Rows of 2,000, as for a schema, end after more than 90 letters.
    assert PROMPT + 20 < output.position < PROMPT + 60
    failure = output.state.failure(output.position)
    assert isinstance(failure, GrammarFailed)
    assert failure.code == "grammar_too_complex"
    assert "too complex" in failure.message
    other = Output(library, source, kind="grammar")
    assert other.allowed(), "another request with the same grammar goes on"


def test_a_withdrawn_request_cancels_its_compilation_and_its_mask(library: LLTokenizer) -> None:
    compilation: Future[Compiled] = Future()
    mask: Future[float] = Future()
    grammar = Grammar(source=regex("[ab]{9}"), kind="regex")
    common = (EOS,), ConstraintTotals(), lambda *_: mask
    state = GrammarState(SamplingParams(grammar=grammar), grammar, lambda *_: compilation, *common)
    state.start("")
    state.prepare(np.array([0], dtype=np.int32))
    state.withdraw()
    assert compilation.cancelled()
    assert mask.cancelled()


@pytest.mark.parametrize("required", [True, False])
def test_a_schema_of_64_properties_is_followed_to_its_end(
    library: LLTokenizer, required: bool
) -> None:
    """The schema is within the limits, although a row of the optional properties has 255 items."""
    names = [f"property_{i}" for i in range(64)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    schema |= {"additionalProperties": False, "required": names if required else []}
    compact = {"item_separator": ",", "key_separator": ":", "whitespace_flexible": False}
    source = LLMatcher.grammar_from_json_schema(schema, overrides=compact)
    output = Output(library, source, kind="json_schema")
    output.add(*ids(json.dumps(dict.fromkeys(names, "text"), separators=(",", ":"))))
    assert output.allowed() == {EOS}


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (LLMatcher.grammar_from_json_schema({"$ref": "#"}), "no token"),
        (LLMatcher.grammar_from_json_schema({"enum": [f"v{i}" for i in range(10**5)]}), "too big"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_fails(
    source: str, reason: str, library: LLTokenizer
) -> None:
    with pytest.raises(GrammarFailed, match=reason):
        compile_grammar(library, Grammar(source=source, kind="json_schema"))


def test_a_failed_compilation_is_the_failure_of_every_position() -> None:
    compiled: Future[Compiled] = Future()
    grammar = Grammar(source="", kind="grammar")
    state = GrammarState(
        SamplingParams(grammar=grammar),
        grammar,
        lambda *_: compiled,
        (EOS,),
        ConstraintTotals(),
        pytest.fail,
    )
    assert not state.prepared(), "the compilation has not started"
    state.start("")
    assert not state.prepared(), "the thread still compiles"
    compiled.set_exception(InvalidRequest("broken"))
    assert state.prepared()
    assert state.failure(5) is state.failure(6) is not None


def mask_of(output: Output) -> np.ndarray:
    mask = np.zeros(output.words, dtype=np.int32)
    output.state.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    output.state.complete(mask)
    return mask


def test_a_copy_follows_drafts_and_leaves_the_state_alone(library: LLTokenizer) -> None:
    output = Output(library, regex("[ab]{2}c?"))
    first = ids("a")[0]
    before = output.allowed()
    assert allows(mask_of(output), first)
    assert not allows(mask_of(output), ids("c")[0])
    assert not allows(mask_of(output), 10**6), "an id outside of the vocabulary"
    copy = output.state.before(first)
    assert copy is not None
    copy.follow([first])
    assert copy.before(ids("b")[0]) is copy
    copy.follow(ids("b"))
    assert copy.matcher.is_accepting()
    assert output.allowed() == before
    assert copy.before(EOS) is None, "the output ends, so no token follows"


def test_forced_tokens_that_the_drafts_in_flight_give_are_not_repeated(
    library: LLTokenizer,
) -> None:
    output = Output(library, regex("[ab]ccc and more of the same (x|y)"))
    output.add(ids("a")[0])
    forced = output.forced()
    assert len(forced) > 2
    for drafts, expected in (
        ([*forced, *ids("x")], []),
        (forced, []),
        (forced[:-1], forced),
    ):
        copy: GrammarState | None = output.state
        for draft in drafts:
            assert copy is not None
            copy = copy.before(draft)
            assert copy is not None
            copy.follow([draft])
        assert output.forced() == expected
    output.add(*forced[:2])
    assert output.forced() == forced[2:], "those drafts were found two tokens earlier"


def test_a_matcher_that_fails_because_of_wrong_drafts_is_replaced(
    library: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer needs fewer lexer states than the limit; answer and drafts need more."""
    few = LLParserLimits(max_lexer_states=80, verbose_errors=False)
    monkeypatch.setattr("minisgl.structured.library.parser_limits", lambda kind: few)
    source = regex("([a-z]{3}|[0-9]{5}x|[A-Z]+q){10,80}")
    plain, output = Output(library, source), Output(library, source)
    renewed = 0
    for token in ids("abc" * 10):
        for draft in ids("0Zx7Qm"):
            copy = output.state.before(draft) if draft in plain.allowed() else None
            if copy is not None:
                copy.follow([draft])
                copy.matcher.compute_bitmask()
        output.state.matcher.compute_bitmask()
        failed = output.state.matcher.is_error()
        assert output.state.renew(library) == failed
        renewed += failed
        assert output.allowed() == plain.allowed()
        plain.add(token)
        output.add(token)
    assert renewed == 1
    assert output.state.before(ids("a")[0]) is None, "no drafts follow a failure"
    assert output.state.matcher.is_accepting()
