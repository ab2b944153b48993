"""Images of requests: their encoding, the rows of the image buffer, and their share of a step."""

from unittest.mock import patch

import numpy as np
import pytest

from minisgl.core import SchedulerConfig
from minisgl.core.batch import WindowLayers
from minisgl.core.images import ImageSpan
from minisgl.images.positions import rotary_delta, rotary_positions
from tests.unit.scheduler.drafts import DRAFTERS, ChangingDrafts
from tests.unit.scheduler.fake_engine import FakeEngine, expected_output
from tests.unit.scheduler.fake_images import image_limits, prompt_with
from tests.unit.scheduler.harness import Harness

PAGE, TOKEN = 4, 7


def harness_with(
    rows: int,
    *,
    budget: int = 64,
    price: float = 1.0,
    cache: str = "radix",
    mutual: bool = False,
    window: WindowLayers | None = None,
) -> Harness:
    memory = image_limits(rows, TOKEN, price, mutual=mutual)
    engine = FakeEngine(80, PAGE, images=memory, window=window)
    config = SchedulerConfig(prefill_budget_tokens=budget, target_step_ms=None, cache_type=cache)
    return Harness(engine, config)


def ask(harness: Harness, parts: list[object]) -> int:
    """Run one request to its end, check its tokens, and return its uid."""
    prompt, images = prompt_with(parts)  # type: ignore[arg-type]
    uid = harness.add(prompt, images=images, ignore_eos=True)
    harness.run()
    assert harness.answers[uid].tokens == expected_output(prompt, 8, ignore_eos=True)
    return uid


def test_an_image_is_encoded_once_for_all_prompts() -> None:
    harness = harness_with(18, cache="naive")
    for begin in (1, 2, 3):
        ask(harness, [begin, (0, (2, 3)), 5, (0, (2, 3))])
    totals = harness.scheduler.stats().images
    assert (totals.encoded, totals.patches, totals.reused) == (1, 6, 2)
    assert (totals.used, totals.rows) == (6, 18)


def test_chunks_through_an_image_encode_it_once() -> None:
    harness = harness_with(27, budget=2)
    ask(harness, [1, (0, (3, 3)), 5])
    assert harness.engine.image_rows.encoded == 1


def test_an_image_that_others_have_replaced_is_encoded_again() -> None:
    harness = harness_with(18, cache="naive")
    for seed, encoded in ((0, 1), (1, 2), (2, 3), (0, 3), (3, 4), (0, 4), (2, 4), (1, 5)):
        ask(harness, [1, (seed, (2, 3)), 5])
        assert harness.scheduler.stats().images.encoded == encoded, "least recently used goes first"


def test_prompts_share_the_pages_before_the_first_pixel_that_differs() -> None:
    harness = harness_with(32)
    text = [*range(1, 9)]
    ask(harness, [*text, (0, (3, 3)), 5, 6, 7])
    again = ask(harness, [*text, (0, (3, 3)), 5, 6, 8, 9])
    other = ask(harness, [*text, (1, (3, 3)), 5, 6, 7])
    assert harness.answers[again].cached_tokens == 16, "also the pages inside the image"
    assert harness.answers[other].cached_tokens == 8


def test_an_image_counts_as_prompt_tokens_of_its_step() -> None:
    harness = harness_with(16, budget=48, price=10.0)  # an image of 4 patches as 40 tokens
    prompt, images = prompt_with([1, 2, (0, (2, 2)), *range(3, 40)])
    harness.add(prompt, images=images, ignore_eos=True, max_tokens=1)
    harness.add([9] * 20, ignore_eos=True, max_tokens=1)
    harness.run()
    first, second = harness.engine.batches[:2]
    assert len(first.images) == 1
    assert first.lengths.tolist() == [2 + 32], "the image leaves 8 tokens, a chunk has at least 32"
    cost = harness.scheduler.view.cost
    image_s = 40 * cost.seconds[-1] / cost.tokens[-1]
    assert first.predict_s(cost) == pytest.approx(cost.predict_s(first.work()) + image_s)
    assert second.lengths.tolist() == [9, 20]


def test_an_image_above_the_budget_waits_for_the_beginning_of_a_chunk() -> None:
    harness = harness_with(16, budget=48, price=100.0)
    prompt, images = prompt_with([*range(1, 41), (0, (2, 2)), 5])
    harness.add(prompt, images=images, ignore_eos=True, max_tokens=1)
    harness.run()
    sizes = [(batch.lengths.tolist(), len(batch.images)) for batch in harness.engine.batches]
    assert sizes == [([40], 0), ([5], 1)]


def test_one_prompt_whose_image_does_not_fit_the_step_is_admitted() -> None:
    """Regression: each waiting prompt took a row and pages for the few tokens before its image."""
    harness = harness_with(16, budget=128, price=11.25)  # an image of 4 patches as 45 tokens
    for seed in range(4):
        prompt, images = prompt_with([1, 2, (seed, (2, 2)), *range(3, 40)])
        harness.add(prompt, images=images, ignore_eos=True, max_tokens=1)
    harness.run()
    steps = [
        (batch.lengths.tolist(), [(image.first, image.end) for image in batch.images])
        for batch in harness.engine.batches
    ]
    assert steps == [
        ([43, 2], [(0, 4), (0, 3)]),
        ([41, 34], [(3, 4), (0, 4)]),
        ([9, 43], [(0, 4)]),
    ]


def test_the_price_of_an_image_is_that_of_its_layers_but_no_less_than_their_launches() -> None:
    limits = image_limits(16, price=10.0)
    assert limits.price((2, 3)) == 60
    assert [limits.price((2, 3), layers) for layers in range(5)] == [0, 15, 30, 45, 60]
    assert [limits.layers_within((2, 3), n) for n in (-1, 0, 14, 15, 59, 60, 99)] == [
        *(0, 0, 0, 1, 3, 4, 4)
    ]
    assert limits._replace(layer_price=20.0).price((2, 3)) == 80


def test_a_decode_step_reads_no_images_of_its_requests() -> None:
    """Regression: each decode step computed the positions after all images again."""
    harness = harness_with(18)
    prompt, images = prompt_with([1, (0, (2, 3)), 5])
    harness.add(prompt, images=images, ignore_eos=True)
    while harness.engine.batches[-1:] == [] or harness.scheduler.view.prefilling:
        harness.step()
    (req,) = {*harness.scheduler.view.table.reqs} - {None}
    with patch.object(type(req), "images", property(lambda _: pytest.fail("images were read"))):
        for _ in range(6):
            harness.step()
    harness.run()  # the end of the request releases them
    assert [batch.rope.deltas.tolist() for batch in harness.engine.batches[1:]] == [[-3]] * 7


def test_histories_have_the_id_of_an_image_token_for_each_pad() -> None:
    memory = image_limits(16, TOKEN)
    engine = FakeEngine(80, PAGE, images=memory, drafter=DRAFTERS["right"])
    harness = Harness(engine, drafts=ChangingDrafts(3))
    parts = [1, (0, (1, 2)), 5]
    prompt, images = prompt_with(parts)  # type: ignore[arg-type]
    script = tuple(expected_output(prompt, 8, ignore_eos=True))
    harness.add(prompt, images=images, ignore_eos=True, prompt_len=4, script=script)
    ask(harness, parts)
    (edit,) = (e for b in engine.batches for e in b.logit_edits if e.history is not None)
    assert edit.history is not None
    assert edit.history.tolist() == [1, TOKEN, TOKEN, 5]
    histories = [each.tokens.tolist() for batch in engine.batches for each in batch.histories]
    assert histories == [[1, TOKEN, TOKEN, 5]] * 2


def test_steps_carry_the_positions_of_image_tokens() -> None:
    harness = harness_with(18)
    ask(harness, [1, 2])
    assert all(batch.rope is None for batch in harness.engine.batches), "no request has images"
    begin = len(harness.engine.batches)
    ask(harness, [1, (0, (2, 3)), 5])
    prompt, *decode = harness.engine.batches[begin:]
    assert prompt.rope is not None
    assert prompt.rope.deltas.tolist() == [3 - 6]
    assert prompt.rope.chunks is not None
    assert prompt.rope.chunks.T.tolist() == [
        *[[0, 0, 0], [1, 1, 1], [1, 1, 2], [1, 1, 3], [1, 2, 1], [1, 2, 2], [1, 2, 3], [4, 4, 4]]
    ]
    assert all(batch.rope is not None and batch.rope.chunks is None for batch in decode)


def test_positions_of_a_chunk_are_those_of_the_whole_prompt() -> None:
    _, images = prompt_with([1, 2, (0, (4, 2)), 3, (1, (2, 6)), 4])
    whole = rotary_positions(images, 2, 0, 12)
    assert whole[:, -1].tolist() == [11 + rotary_delta(images, 2)] * 3
    for first in range(12):
        assert np.array_equal(rotary_positions(images, 2, first, 12), whole[:, first:])


def test_an_image_that_attends_both_ways_lies_in_one_chunk() -> None:
    """It exceeds the budget if it is near the beginning of the first chunk of a step."""
    harness = harness_with(27, budget=2, mutual=True)
    ask(harness, [1, (0, (3, 3)), 5, 6, 7])
    chunks = [batch for batch in harness.engine.batches if len(batch.chunk_ids)]
    assert [batch.lengths.tolist() for batch in chunks] == [[10], [2], [1]]
    assert [batch.spans for batch in chunks] == [(ImageSpan(0, 1, 10),), (), ()]
    assert all(batch.rope is None for batch in chunks), "its positions have one axis"


def test_a_hit_may_end_within_an_image_whose_rest_is_one_chunk() -> None:
    harness = harness_with(27, mutual=True)
    ask(harness, [1, 2, (0, (3, 3)), 5, 6])
    begin = len(harness.engine.batches)
    ask(harness, [1, 2, (0, (3, 3)), 7, 8])
    assert harness.engine.batches[begin].spans == (ImageSpan(0, 8, 11),)


def test_an_image_does_not_exceed_the_budget_beside_other_chunks() -> None:
    harness = harness_with(27, budget=40, price=0.1, mutual=True)
    first, (second, images) = [*range(1, 36)], prompt_with([1, (0, (3, 3)), 5])
    harness.add(first, ignore_eos=True, max_tokens=1)
    harness.add(second, images=images, ignore_eos=True, max_tokens=1)
    harness.run()
    assert [batch.lengths.tolist() for batch in harness.engine.batches] == [[35, 1], [10]]


def test_an_image_does_not_exceed_the_budget_once_two_requests_have_chunks() -> None:
    """Regression: the first request did so in the second round of a step. The warm-up did not."""
    harness = harness_with(200, budget=64, price=0.4, mutual=True)
    harness.add([1], client="stream", ignore_eos=True, max_tokens=30)
    while not len(harness.scheduler.view.decode_rows):
        harness.step()
    prompt, images = prompt_with([*range(3, 13), (1, (8, 8)), 5])
    harness.add(prompt, images=images, client="image", ignore_eos=True)
    harness.add([2] * 12, client="text", ignore_eos=True)
    harness.run()
    chunks = [batch.lengths[batch.num_decode :].tolist() for batch in harness.engine.batches]
    assert chunks[1:4] == [[10, 12], [64], [1]]


def test_an_image_that_attends_both_ways_runs_beside_prompts_of_ever_new_clients() -> None:
    """Regression: new clients come first, so its chunk, which exceeds a step, was never first."""
    harness = harness_with(200, budget=32, price=0.1, mutual=True)
    prompt, images = prompt_with([1, (0, (8, 8)), 5])
    uid = harness.add(prompt, images=images, client="image", ignore_eos=True)
    for nth in range(60):
        harness.add([nth + 1, *range(2, 40)], client=f"{nth}", ignore_eos=True, max_tokens=1)
        harness.step()
    assert harness.answers[uid].tokens


def test_two_clients_with_few_window_pages_compute_their_images() -> None:
    """Regression: each had the pages of a window, and neither found those of its image."""
    harness = harness_with(
        36, mutual=True, window=WindowLayers(5, WindowLayers(5, 0).reserve(PAGE, 12)), budget=16
    )
    for seed in range(2):
        prompt, images = prompt_with([seed + 1, *range(3, 42), (seed, (3, 4)), *range(10, 16)])
        harness.add(prompt, images=images, client=f"{seed}", ignore_eos=True)
    for _ in range(60):
        if not harness.scheduler.idle or harness.inbox.messages:
            harness.step()
    assert [len(answer.tokens) for answer in harness.answers.values()] == [8, 8]


def test_an_image_does_not_take_the_budget_of_the_first_chunk() -> None:
    """Regression: half of the budget is less than a page of states, so it began with an image.

    The other half was then less than a page too, and no request had a chunk.
    """
    memory = image_limits(16, TOKEN, price=4.0)
    engine = FakeEngine(80, 8, images=memory, snapshot_pages=2)
    config = SchedulerConfig(prefill_budget_tokens=8, target_step_ms=None)
    harness = Harness(engine, config)
    prompt, images = prompt_with([(0, (2, 2)), *range(1, 12)])
    uid = harness.add(prompt, images=images, client="a", ignore_eos=True)
    harness.add([*range(20, 30)], client="b", ignore_eos=True)
    harness.run()
    assert harness.answers[uid].tokens == expected_output(prompt, 8, ignore_eos=True)
