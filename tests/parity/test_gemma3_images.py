"""Gemma 3 with images against transformers: features and logits, without an engine."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.core.images import ImageSpan
from minisgl.distributed.comm import Communicator, SingleCommunicator
from tests.parity.gemma3_models import (
    BEGIN,
    END,
    IMAGE,
    MODELS,
    logits_of,
    picture,
    save,
    tokens_of,
    values_of,
)
from tests.parity.hybrid import Runner
from tests.unit.distributed.ranks import run_ranks

DECODED = 4  # of the tokens after the last image, which run as decode steps


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_features_of_an_image_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, path = save(name, tmp_path)
    encoder = Runner(path, SingleCommunicator(), images=True).model.encoder
    assert encoder is not None
    expected = model.model.get_image_features(values_of(picture(0))).pooler_output[0]
    found = encoder.encode(picture(0)) * encoder.spec.divisor
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


def prompt_of(count: int) -> tuple[list[int], list[int]]:
    """Return a prompt with two images of `count` tokens, and their first tokens."""
    image = [BEGIN, *[IMAGE] * count, END]
    return [5, 9, 2, *image, 7, 8, *image, *range(20, 32)], [4, 4 + count + 4]


def check_logits(
    comm: Communicator, path: str, ids: list[int], firsts: list[int], wanted: Tensor, size: int
) -> None:
    """Compare the logits of chunks of `size` tokens. A chunk that ends in an image gets all of it.

    wanted: of transformers.
    """
    runner, found = Runner(path, comm, images=True), []
    encoder, count = runner.model.encoder, ids.count(IMAGE) // len(firsts)
    inputs = torch.tensor(ids)
    with torch.inference_mode():
        for nth, first in enumerate(firsts):
            inputs[first : first + count] = ~torch.arange(nth * count, (nth + 1) * count)
        if encoder is not None:
            features = torch.cat([encoder.encode(picture(seed)) for seed in range(len(firsts))])
            runner.model.model.embed_tokens.images = features
        start = 0
        while start < len(ids):
            decode = start >= len(ids) - DECODED
            end = start + 1 if decode else min(start + size, len(ids) - DECODED)
            end = next((f + count for f in firsts if f < end < f + count), end)
            spans = [(max(f, start), f + count) for f in firsts if f < end and f + count > start]
            chunk = inputs[start:end].tolist()
            given = tuple(ImageSpan(0, *span) for span in spans)
            found.append(runner.run(chunk, start, decode, spans=given))
            start = end
        shares = comm.gather(torch.cat(found))
    logits = torch.cat(list(shares), dim=-1)[:, : wanted.shape[1]]
    torch.testing.assert_close(logits, wanted, atol=2e-3, rtol=2e-3)


def case(name: str, folder: Path) -> tuple[Any, ...]:
    model, path = save(name, folder)
    ids, firsts = prompt_of(tokens_of(model))
    return path, ids, firsts, logits_of(model, ids, [0, 1])


@pytest.mark.parametrize("size", [1, 7, 64])
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_chunks_around_images_are_those_of_transformers(
    name: str, size: int, tmp_path: Path
) -> None:
    check_logits(SingleCommunicator(), *case(name, tmp_path), size)


def test_two_ranks_give_the_logits_of_transformers(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, check_logits, *case("window-20", tmp_path), 7)
