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
    options, rest = _parsed(program.main, flags)
    model = getattr(options, "model", None)
    known = model is None or model in SHAPES or model == _FOLDER or Path(model).is_dir()
    assert known, f"{command}: no model {model}"
    for server_flags in (rest, getattr(options, "server_flags", [])):
        build_parser().parse_strictly(server_flags)
    return options


def _parsed(
    main: Callable[[Sequence[str]], int], flags: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags that the program knows, and those that it gives to a server."""
    parse_known_args = argparse.ArgumentParser.parse_known_args
    found: list[tuple[argparse.Namespace, list[str]]] = []

    def stop_knowing(self: argparse.ArgumentParser, args: Sequence[str]) -> None:
        found.append(parse_known_args(self, args))
        raise _Parsed

    def stop(self: argparse.ArgumentParser, args: Sequence[str]) -> None:
        options, unknown = parse_known_args(self, args)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        found.append((options, []))
        raise _Parsed

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(_Parsed):
        patch.setattr(argparse.ArgumentParser, "parse_known_args", stop_knowing)
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        main(flags)
    return found[0]
