"""The examples in docs/README.md run unchanged, and print the output that the page shows."""

import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forks import run_forked
from tests.patience import patience
from tests.process.harness import run_server

PAGE = Path(__file__).parents[2] / "docs" / "README.md"
_BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
_VARYING = [(re.compile(r'"id":"chatcmpl-\w+"'), '"id":"chatcmpl-0"')]
_VARYING += [(re.compile(r'"created":\d+'), '"created":0')]


def examples() -> list[tuple[str, str, str]]:
    """(language, code, output) of each example that talks to the server."""
    blocks = _BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    pairs = itertools.pairwise(blocks)
    return [
        (language, code, output)
        for (language, code), (following, output) in pairs
        if "127.0.0.1:1919" in code and following == "text"
    ]


def without_varying(text: str) -> str:
    for pattern, fixed in _VARYING:
        text = pattern.sub(fixed, text)
    return " ".join(text.split())


@pytest.mark.process
def test_example_without_a_server_prints_the_output_in_the_page() -> None:
    blocks = _BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    ((code, shown),) = [
        (code, shown)
        for (_, code), (_, shown) in itertools.pairwise(blocks)
        if "from minisgl import" in code
    ]
    done = run_forked(["-c", code], patience())
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown


@pytest.mark.process
@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on PATH: apt install curl")
def test_examples_print_the_output_in_the_page() -> None:
    assert [language for language, _, _ in examples()] == ["sh", "python", "python", "python"]
    with run_server() as server:
        url = server.wait_ready().url
        for language, code, output in examples():
            code = code.replace("http://127.0.0.1:1919", url)
            if language == "sh":
                command = ["bash", "-c", code.replace("curl ", "curl -s ")]
            else:
                command = [sys.executable, "-c", code]
            done = subprocess.run(command, capture_output=True, text=True, timeout=patience())
            assert done.returncode == 0, done.stderr
            assert without_varying(done.stdout) == without_varying(output)
