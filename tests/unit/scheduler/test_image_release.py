"""The pixels and the encodings of requests that have ended are released."""

from sys import getrefcount

import pytest

from tests.unit.scheduler.fake_images import LAYERS, prompt_with
from tests.unit.scheduler.test_images import harness_with
from tests.unit.scheduler.test_images_beside_streams import ask_for, beside_streams, encodings


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_an_aborted_request_leaves_no_pixels_and_no_encoding(overlap: bool, alone: bool) -> None:
    """Regression: both stayed until a further step, which another request had to bring."""
    harness = beside_streams(overlap)
    prompt, (image,) = prompt_with([9, (0, (4, 2)), 5])
    held = getrefcount(image), getrefcount(image.pixels)
    uid = harness.add(prompt, images=(image,))
    while not encodings(harness):
        harness.step()
    (encoding,) = harness.engine.batches[-1].images
    assert encoding.end < LAYERS
    state = encoding.state
    del encoding
    for each in [*harness.answers] if alone else [uid]:
        harness.abort(each)
    for _ in range(1 if alone else 3):
        harness.step()
    assert harness.scheduler.idle == alone
    harness.engine.batches.clear()
    assert (getrefcount(image), getrefcount(image.pixels)) == held
    assert getrefcount(state) == 2, "the variable and the argument"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_does_not_continue_the_image_of_a_preempted_request_leaves_no_encoding(
    overlap: bool,
) -> None:
    harness = beside_streams(overlap)
    uid, tokens = ask_for(harness, 0, 4, priority=1)
    while not encodings(harness):
        harness.step()
    (encoding,) = harness.engine.batches[-1].images
    state = encoding.state
    del encoding
    for first in range(4, 9):  # with three streams and the image, one request more than rows
        harness.add([first], ignore_eos=True, max_tokens=40)
    while not harness.scheduler.totals.preemptions_total:
        harness.step()
    assert 1 < len(encodings(harness)) < LAYERS
    harness.step()
    assert harness.scheduler.view.waiting
    harness.engine.batches.clear()
    assert getrefcount(state) == 2, "the variable and the argument"
    harness.run()
    assert harness.answers[uid].tokens == tokens
    assert encodings(harness)[0][0][0] == 0, "the encoding begins again"


def test_an_ended_request_whose_constraint_was_prepared_keeps_no_pixels() -> None:
    """Regression: the queue of preparations has the request until the next one arrives."""
    harness = harness_with(18)
    prompt, (image,) = prompt_with([1, (0, (2, 3)), 5])
    held = getrefcount(image), getrefcount(image.pixels)
    harness.add(prompt, images=(image,), script=(1,), ignore_eos=True, max_tokens=1)
    harness.run()
    harness.engine.batches.clear()
    assert (getrefcount(image), getrefcount(image.pixels)) == held
