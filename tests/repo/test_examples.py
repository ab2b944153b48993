"""Tests by Hypothesis draw new examples in each run, a quarter of them outside of a proof."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEST = """
from hypothesis import given, settings, strategies as st
from tests.examples import examples

seen = []

@given(st.integers())
def test_default(number): seen.append(number)

@settings(max_examples=examples(30))
@given(st.integers())
def test_own(number): seen.append(number)

def test_last():
    print(len(seen), settings().derandomize)
"""


@pytest.mark.parametrize(
    ("options", "count"), [((), 25 + 7), (("--hypothesis-profile", "deep"), 100 + 30)]
)
def test_examples_are_new_in_ci_and_more_in_a_proof(
    tmp_path: Path, options: tuple[str, ...], count: int
) -> None:
    (tmp_path / "conftest.py").write_text("from tests.examples import *\nregister_profiles()\n")
    (tmp_path / "test_it.py").write_text(TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-rP", "-p", "no:cacheprovider", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CI": "true"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert f"{count} False" in done.stdout, done.stdout
