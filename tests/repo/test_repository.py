"""The files of the repository obey its rules. A failure names the file and the line."""

import importlib
import os
import re
import subprocess
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from bench.__main__ import NAMES
from minisgl.__main__ import COMMANDS
from minisgl.benchmark.cli import HELP
from tests.repo import rules

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {".venv", ".git", "build", "dist"}  # at the root


@cache
def tracked() -> tuple[str, ...]:
    """Files that Git tracks or would add. Without Git: files that are not generated."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        names = listed.stdout.rstrip("\0").split("\0")
    else:
        names = []
        for folder, folders, files in os.walk(ROOT):
            at = Path(folder).relative_to(ROOT)
            folders[:] = [
                f
                for f in folders
                if str(at / f) not in GENERATED and not f.endswith(("cache", "cache__", "-info"))
            ]
            names += [str((Path(folder) / name).relative_to(ROOT)) for name in files]
    return tuple(sorted(name for name in set(names) if (ROOT / name).is_file()))


@cache
def read(name: str) -> str | None:
    """The text of a tracked file; None for a binary file."""
    try:
        return (ROOT / name).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def python_files(*folders: str) -> list[str]:
    return [name for name in tracked() if name.startswith(folders) and name.endswith(".py")]


def texts() -> list[str]:
    return [name for name in tracked() if read(name) is not None]


def offences(rule: Callable[[str], list[rules.Offence]], names: list[str]) -> list[str]:
    assert names, "the rule looked at no file"
    return [
        f"{name}:{offence.line}: {offence.text}"
        for name in names
        for offence in rule(read(name) or "")
    ]


def test_source_files_have_at_most_400_lines():
    names = python_files("minisgl/", "bench/", "tests/", "demo/", "k8s-tests/")
    assert offences(rules.too_long, names) == []


def test_ruff_checks_unsafe_loads_private_attributes_and_broad_handlers():
    lint = tomllib.loads(read("pyproject.toml") or "")["tool"]["ruff"]["lint"]
    assert {"T20", "BLE", "S102", "S301", "S302", "S307", "SLF001", "TD"} <= set(lint["select"])
    banned = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "torch.load"}
    assert banned <= lint["flake8-tidy-imports"]["banned-api"].keys()


def test_no_machine_paths():
    assert offences(rules.machine_paths, texts()) == []


def test_no_registry_hosts():
    assert offences(rules.registry_hosts, texts()) == []


def test_every_todo_outside_of_python_has_an_issue():
    names = [n for n in texts() if n.endswith((".sh", ".yaml", ".yml", ".toml", "Makefile", "run"))]
    assert offences(rules.loose_todos, names) == []


def test_no_test_has_a_fixed_timeout():
    names = [name for name in python_files("tests/") if name != "tests/repo/test_rules.py"]
    assert offences(rules.fixed_timeouts, names) == []


def test_every_skip_has_a_reason():
    assert offences(rules.silent_skips, python_files("tests/", "k8s-tests/")) == []


def test_every_source_folder_is_a_package():
    folders = {str(Path(n).parent) for n in python_files("minisgl/", "bench/")}
    assert {f for f in folders if not (ROOT / f / "__init__.py").is_file()} == set()


@pytest.mark.parametrize("file", [n for n in python_files("minisgl/") if n.endswith("__init__.py")])
def test_package_lists_its_exports(file):
    names = rules.exported(read(file) or "")
    assert names is not None, "no __all__"
    module = importlib.import_module(file.removesuffix("/__init__.py").replace("/", "."))
    assert [name for name in names if not hasattr(module, name)] == []
    assert len(names) == len(set(names))


def test_ci_run_is_executable():
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert (read(".ci/run") or "").startswith("#!/usr/bin/env bash\n")


def test_make_help_prints_only_commands():
    words = ["make", "--no-print-directory", "help"]  # make may itself run this test
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert {line.split()[0] for line in done.stdout.splitlines()} == {"make"}


def test_tested_code_blocks_have_their_tests():
    missing = [
        f"{page}: {file}::{test}"
        for page in texts()
        if page == "README.md" or page.startswith("docs/")
        for file, test, has_block in rules.tested_marks(read(page) or "")
        if not (has_block and file in tracked() and f"def {test}(" in (read(file) or ""))
    ]
    assert missing == []


def test_links_of_pages_have_targets():
    broken = [
        f"{page}: {file}#{anchor}"
        for page in texts()
        if page.endswith(".md")
        for file, anchor in rules.links(read(page) or "")
        if not _exists(ROOT / page if not file else (ROOT / page).parent / file, anchor)
    ]
    assert broken == []


def test_commands_of_pages_exist():
    known = {f"minisgl {name}" for name in COMMANDS}
    known |= {f"minisgl bench {name}" for name in HELP} | {
        f"python -m bench {name}" for name in NAMES
    }
    pages = [page for page in texts() if page.endswith(".md") and page != "CHANGELOG.md"]
    found = {page: rules.commands(read(page) or "") - known for page in pages}
    assert {page: names for page, names in found.items() if names} == {}


def _exists(path: Path, anchor: str) -> bool:
    return path.exists() and (not anchor or anchor in rules.anchors(path.read_text("utf-8")))


@pytest.mark.parametrize(("names", "most"), rules.WORD_BUDGETS, ids=str)
def test_pages_stay_within_their_budget_of_words(names, most):
    pages = [path for pattern in names.split() for path in ROOT.glob(pattern)]
    assert pages, "the budget is for no page"
    assert sum(len(path.read_text(encoding="utf-8").split()) for path in pages) <= most


def test_lock_pins_every_dependency_and_extra():
    lock = (read("constraints.txt") or "").splitlines()
    pins = [line for line in lock if not line.startswith("#")]
    assert [p for p in pins if not re.fullmatch(r"[\w.-]+==\d[a-z\d.]*", p)] == []
    pinned = {_normal(pin.split("==")[0]) for pin in pins}
    project = tomllib.loads(read("pyproject.toml") or "")["project"]
    extras = [project["optional-dependencies"][extra] for extra in ("test", "dev", "k8s")]
    wanted = {
        _normal(re.split(r"[<>=!~\[; ]", line, maxsplit=1)[0])
        for line in [*project["dependencies"], *(line for extra in extras for line in extra)]
    }
    assert wanted - pinned == set()


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
