"""Graphs compute the positions of images as eager steps do, on a CPU (emulated_graphs.py).

The prompts have no images. Their tokens have the positions of images, which all layers read.
"""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from minisgl.core.batch import Batch
from minisgl.core.images import RopePositions
from minisgl.engine import ModelRunner
from minisgl.engine.launched import LaunchedStep
from minisgl.engine.step import GraphStep, PiecewiseStep, Step
from minisgl.images.positions import rotary_delta, rotary_positions
from tests.parity.driver import Driver, Work, make_engine
from tests.parity.image_models import MERGE, save
from tests.unit.engine.emulated_graphs import emulate_decode_graphs
from tests.unit.engine.test_draft_pieces import picked as picked


class Placed(NamedTuple):
    start: int
    grid: tuple[int, int]


IMAGES = (Placed(3, (4, 6)), Placed(12, (8, 4)))
TEXT, PROMPT, CHUNK = [4, 8, 15, 16, 23, 42], [7 * i % 130 for i in range(26)], 10


def tokens_of(path: str) -> list[list[int]]:
    """Return the greedy tokens of a text, and of a prompt whose chunks cut the places of images.

    The text decodes beside the chunks.
    """
    engine = make_engine(path, page_size=16)
    driver, launch = Driver(engine), engine.launch
    delta, positions = rotary_delta(IMAGES, MERGE), None

    def with_positions(batch: Batch) -> LaunchedStep:
        deltas = np.where(batch.rows == 1, 0, delta).astype(np.int32)
        return launch(replace(batch, rope=RopePositions(deltas, positions)))

    engine.launch = with_positions  # type: ignore[method-assign]
    driver.step(Work(0, 0, [1]))  # the row of the prompt had another request
    text, found = [int(driver.step(Work(1, 0, TEXT)).tokens[0, 0])], list[int]()
    for start in range(0, len(PROMPT), CHUNK):
        ids = PROMPT[start : start + CHUNK]
        positions = rotary_positions(IMAGES, MERGE, start, start + len(ids))
        work = Work(1, len(TEXT) + len(text) - 1), Work(0, start, ids)
        result = driver.step(*work)
        text.append(int(result.tokens[0, 0]))
    found.append(int(result.tokens[1, 0]))
    positions = None
    for _ in range(6):
        work = Work(1, len(TEXT) + len(text) - 1), Work(0, len(PROMPT) + len(found) - 1)
        tokens = driver.step(*work).tokens[:, 0].tolist()
        text.append(tokens[0])
        found.append(tokens[1])
    return [text, found]


def test_decode_graphs_add_the_delta_of_each_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = save("qwen3_5", tmp_path)
    expected = tokens_of(path)
    steps = emulate_decode_graphs(monkeypatch)
    assert tokens_of(path) == expected
    assert [type(step) for batch, step in steps if batch.num_decode == 2][-6:] == [GraphStep] * 6


def test_pieces_read_the_mixed_angles_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    _, path = save("qwen3-vl", tmp_path)
    expected = tokens_of(path)
    steps: list[tuple[int, Step]] = request.getfixturevalue("picked")
    assert tokens_of(path) == expected
    eager = [tokens for tokens, step in steps if not isinstance(step, PiecewiseStep)]
    assert CHUNK + 1 in eager, "DeepStack runs without graphs"
    steps.clear()
    monkeypatch.setattr(ModelRunner, "has_deepstack", False)  # no token has features
    assert tokens_of(path) == expected
    assert all(isinstance(step, PiecewiseStep) for _, step in steps)
