"""The masks of one step with drafts: their rows, and the ids that they allow."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from llguidance import LLMatcher

from minisgl.core import Grammar, SamplingParams
from minisgl.core.batch import Batch, EditedReq, PageUpdates
from minisgl.demo import model_path
from minisgl.engine.logits_processing import ProcessingStep
from minisgl.engine.model_runner import DraftTensors
from minisgl.structured.matcher import GrammarState
from minisgl.structured.processor import GrammarProcessor

EOS, ROW, PLACE, PROMPT = 0, 2, 8, 5
TOKENIZER = tokenizers.Tokenizer.from_file(str(model_path() / "tokenizer.json"))


@pytest.fixture(scope="module")
def processor() -> GrammarProcessor:
    return GrammarProcessor(str(model_path()), (EOS,))


def ids(text: str) -> list[int]:
    return [TOKENIZER.token_to_id(char) for char in text]


def opened(processor: GrammarProcessor, pattern: str, **params: Any) -> GrammarState:
    """Return the state of a request that has sampled no token."""
    grammar = Grammar(source=LLMatcher.grammar_from_regex(pattern), kind="regex")
    state = processor.open(SamplingParams(grammar=grammar, **params))
    assert state is not None
    state.start("")
    assert state.prepared(None)
    assert state.unseen(PROMPT, PROMPT) == 0
    return state


def masks(
    processor: GrammarProcessor,
    state: GrammarState,
    output: Sequence[int],
    drafts: Sequence[int],
    found: int | None = None,
    length: int | None = None,
) -> dict[int, set[int]]:
    """Return the allowed ids by the row of logits, for a step with `drafts` after `output`."""
    known = PROMPT + len(output)
    pool = torch.zeros((4, 64), dtype=torch.int32)
    pool[ROW, PROMPT : known + len(drafts)] = torch.tensor([*output, *drafts], dtype=torch.int32)
    cached = torch.zeros(4, dtype=torch.int32)
    cached[ROW] = known - 1
    counts = torch.zeros(4, dtype=torch.int32)
    counts[PLACE // 8] = len(drafts) if found is None else found
    none = np.empty(0, dtype=np.int32)
    # A second request forwards eight tokens, and the host takes the position for a later one.
    batch = Batch(
        step_id=1,
        num_decode=2,
        rows=np.array([ROW, 3], dtype=np.int32),
        start=np.array([known + 3, 9], dtype=np.int32),
        lengths=np.array([len(drafts) + 1 if length is None else length, 8], dtype=np.int32),
        samples=np.array([True, True]),
        chunk_ids=none,
        page_updates=PageUpdates(none, none, none),
        sampling={},
        drafting=True,
    )
    tensors = DraftTensors(cached, counts, torch.zeros_like(counts))
    step = ProcessingStep(batch, np.array([PLACE, 0]), None, pool, (EOS,), tensors)  # type: ignore[arg-type]
    req = EditedReq(0, known + 4 + len(drafts), PROMPT, None, (state,))
    rows, mask, _ = processor.prepare([(req, state)], step).compute()
    bits = np.unpackbits(mask.numpy().view(np.uint8), axis=1, bitorder="little")
    assert len(set(rows.tolist())) == len(rows)
    return {
        row: set(np.flatnonzero(each).tolist())
        for row, each in zip(rows.tolist(), bits, strict=True)
    }


def test_each_allowed_draft_has_a_mask_for_the_position_after_it(
    processor: GrammarProcessor,
) -> None:
    state = opened(processor, "[ab][cd][ef][gh]")
    found = masks(processor, state, ids("a"), ids("de"))
    firsts = {row: {TOKENIZER.id_to_token(token)[0] for token in of} for row, of in found.items()}
    assert firsts == {PLACE: {"c", "d"}, PLACE + 1: {"e", "f"}, PLACE + 2: {"g", "h"}}
    found = masks(processor, state, ids("ac"), [])
    assert list(found) == [PLACE], "the state has followed no draft"
    assert set(ids("ef")) <= found[PLACE]


def test_no_mask_follows_a_forbidden_draft(processor: GrammarProcessor) -> None:
    state = opened(processor, "[ab][cd][ef][gh]")
    assert list(masks(processor, state, ids("a"), ids("dxe"))) == [PLACE, PLACE + 1]
    assert list(masks(processor, state, ids("ad"), ids("xeg"))) == [PLACE]


def test_no_token_may_follow_a_draft_that_ends_the_output(processor: GrammarProcessor) -> None:
    state = opened(processor, "a[bc]?")
    found = masks(processor, state, ids("a"), [EOS, *ids("b")])
    assert EOS in found[PLACE]
    assert found[PLACE + 1] == set()
    assert len(found) == 2


def test_an_output_that_would_be_ended_ends_with_the_same_token_after_drafts(
    processor: GrammarProcessor,
) -> None:
    """Without drafts, the scheduler appends the EOS id as a forced token."""
    stop = ids("z")[0]
    state = opened(processor, "a[bc]", stop_token_ids=(stop,))
    assert masks(processor, state, ids("a"), ids("b"))[PLACE + 1] == {EOS}
    tokens = np.array([0] * PROMPT + ids("ab"), dtype=np.int32)
    assert list(state.forced(tokens)) == [EOS]
    assert masks(processor, state, ids("ab"), [])[PLACE] == {EOS, stop}, "is dropped"


def test_only_drafts_that_the_engine_found_and_forwards_have_masks(
    processor: GrammarProcessor,
) -> None:
    state = opened(processor, "[ab]{9}")
    assert len(masks(processor, state, ids("a"), ids("baba"))) == 5
    assert len(masks(processor, state, ids("a"), ids("baba"), found=0)) == 1
    assert len(masks(processor, state, ids("a"), ids("baba"), length=3)) == 3


def test_all_tokens_of_the_previous_step_are_followed(processor: GrammarProcessor) -> None:
    state = opened(processor, "(abcdefgh)+x")
    assert len(masks(processor, state, ids("a"), [])) == 1
    found = masks(processor, state, ids("abcdefgha"), ids("b"))
    assert {row: [TOKENIZER.id_to_token(t) for t in of] for row, of in found.items()} == {
        PLACE: ["b"],
        PLACE + 1: ["c"],
    }
