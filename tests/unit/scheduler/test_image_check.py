"""`check_images`: the images of a request fit its prompt and the engine."""

import msgspec
import numpy as np
import pytest

from minisgl.core import InvalidRequest, SamplingParams
from minisgl.message.messages import AddReq, PromptImage
from minisgl.scheduler.image_check import check_images
from tests.unit.scheduler.fake_images import image_limits, prompt_with


def refused(images: tuple[PromptImage, ...], ids: list[int], rows: int | None = 100) -> str:
    message = AddReq(uid=1, token_ids=b"", sampling=SamplingParams(), images=images)
    memory = None if rows is None else image_limits(rows)
    with pytest.raises(InvalidRequest) as error:
        check_images(message, np.array(ids, dtype=np.int32), memory)
    return str(error.value)


def test_images_that_do_not_fit_the_prompt_or_the_engine_are_refused() -> None:
    ids, images = prompt_with([1, (0, (2, 3)), 5, (1, (2, 2))])
    first, second = images
    assert "no image encoder" in refused(images, ids, rows=None)
    assert "not of an image" in refused((first,), ids)
    assert "not of an image" in refused((), [1, -5], rows=None)
    assert "tokens of its own" in refused((first, first, second), ids)
    for wrong in ({"start": 4}, {"start": -1}, {"grid": (0, 3)}, {"pixels": b""}):
        moved = msgspec.structs.replace(second, **wrong)
        for sent in (moved, moved.without_pixels()):  # the other ranks refuse it as well
            assert "tokens of its own" in refused((first, sent), ids)
    assert "6 tokens, and this server takes images of at most 5" in refused(images, ids, rows=17)
    accepted = AddReq(uid=1, token_ids=b"", sampling=SamplingParams(), images=images)
    other = msgspec.structs.replace(accepted, images=[i.without_pixels() for i in images])
    for message in (accepted, other):
        check_images(message, np.array(ids, dtype=np.int32), image_limits(100))
    message = AddReq(
        uid=1, token_ids=b"", images=images, sampling=SamplingParams(prompt_logprobs=0)
    )
    with pytest.raises(InvalidRequest, match="prompt with images"):
        check_images(message, np.array(ids, dtype=np.int32), image_limits(100))
