"""Parses the command lines of benchmarks as their programs do, without running them."""

import argparse
import contextlib
import importlib
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from minisgl.benchmark.models import SHAPES
from minisgl.settings.command_line import build_parser

_VARIABLES = re.compile(r"^(?:\w+=(?:\$\([^)]*\)|\S+) )+")
_MODULES = {"fleet": "fleet.cli"}
_FOLDER = "FOLDER"  # stands for a model folder


class _Parsed(Exception):
    """The program has parsed its flags."""


def parse(command: str) -> argparse.Namespace:
    """Return the flags of `minisgl bench NAME ...` or `python -m bench NAME ...`.

    Fails when the program refuses the flags, or when there is no such program or model. Of a
    campaign the rows exist, too.
    """
    words = shlex.split(_VARIABLES.sub("", command))
    if words[:2] == ["minisgl", "bench"]:
        name, flags = words[2], words[3:]
        module = f"minisgl.benchmark.{_MODULES.get(name, name)}"
    else:
        assert words[:3] == ["python", "-m", "bench"], f"not a benchmark: {command}"
        name, flags = words[3], words[4:]
        module = f"bench.{name}"
    program = importlib.import_module(module)
    if name == "campaign":
        assert program.main([*flags, "--list"]) == 0
    options = _parsed(program.main, flags)
    model = getattr(options, "model", None)
    known = model is None or model in SHAPES or model == _FOLDER or Path(model).is_dir()
    assert known, f"{command}: no model {model}"
    build_parser().parse_strictly(getattr(options, "server_flags", []))
    return options


def _parsed(main: Callable[[Sequence[str]], int], flags: Sequence[str]) -> argparse.Namespace:
    parse_args = argparse.ArgumentParser.parse_args
    found: list[argparse.Namespace] = []

    def stop(self: argparse.ArgumentParser, args: Sequence[str]) -> None:
        found.append(parse_args(self, args))
        raise _Parsed

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(_Parsed):
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        main(flags)
    return found[0]
