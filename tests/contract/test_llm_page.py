"""docs/llm.md names all of the Python API, and its example runs."""

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import minisgl
from minisgl import LLM, SamplingParams
from minisgl.llm import Completion, Logprob, Piece, ToolCall
from tests.forks import run_forked
from tests.patience import patience

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "llm.md").read_text()
NAMED = set(re.findall(r"`(\w+)", PAGE))


def test_page_names_every_public_method_with_its_parameters() -> None:
    methods = {name: f for name, f in inspect.getmembers(LLM, callable) if name[0] != "_"}
    assert {"generate", "chat", "stream", "close", "default_sampling"} <= methods.keys() <= NAMED
    for name, method in [("LLM", LLM), *methods.items()]:
        (shown,) = re.findall(rf"`{name}\((.*?)\)`", PAGE)[:1]
        for parameter in inspect.signature(method).parameters.keys() - {"self"}:
            assert parameter in re.findall(r"\w+", shown), f"{parameter} of {name}"


def test_page_names_every_attribute_and_field() -> None:
    source = inspect.getsource(LLM.__init__)
    attributes = set(re.findall(r"self\.([a-z]\w*)[ :]", source))
    assert attributes >= {"tokenizer", "facts"}
    fields = {
        f.name for kind in (Completion, Piece, Logprob, ToolCall) for f in dataclasses.fields(kind)
    }
    for name in attributes | fields | set(SamplingParams.__struct_fields__):
        assert name in NAMED, name


def test_example_of_the_page_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    done = run_forked(["-c", code], patience(120))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("42\n")


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, minisgl; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=patience(120))
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        _ = minisgl.Llm
