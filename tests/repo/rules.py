"""The repository's own lint rules, beyond those of ruff in pyproject.toml.

A rule is a pure function from the text of a file to its offences. test_repository.py applies the
rules to files; test_rules.py plants an offence for each rule.
"""

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

MAX_FILE_LINES = 400
# Words (as `wc -w` counts them) that the pages of each row may have together. A page that says more
# replaces something, or belongs to the decisions or to the notebook of measurements.
WORD_BUDGETS = (
    ("README.md", 800),
    ("CONTRIBUTING.md", 300),
    ("docs/*.md", 32_460),
    ("docs/README.md", 3_000),
    ("docs/architecture.md", 2_650),
    ("docs/benchmarks.md", 3_000),
    ("docs/development.md", 1_800),
    ("docs/operations.md docs/capacity.md docs/security.md", 10_400),
    ("docs/api.md docs/models.md docs/llm.md docs/playground.md", 11_330),
)

MACHINE_PATH = re.compile(r"(?<![\w./:])/(?:work|farm|home|Users|root)/")
_REGISTRIES = ("pypi", "pythonhosted", "npmjs", "yarnpkg", "debian", "ubuntu", "anaconda", "golang")
REGISTRY_HOST = re.compile(
    rf"\b(?:{'|'.join(_REGISTRIES)})\.(?:org|com)\b|\bcrates\.io\b|\bmirrors?\.[\w-]+\.\w+",
    re.IGNORECASE,
)
TODO = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b(?!\(#\d+\):)")
# Calls that skip a test or expect its failure, and whether their first argument is the reason.
SKIPS = {
    "pytest.skip": True,
    "pytest.xfail": True,
    "pytest.importorskip": False,
    "pytest.mark.skip": True,
    "pytest.mark.skipif": False,
    "pytest.mark.xfail": False,
}
TESTED_MARK = re.compile(
    r"<!-- tested: (?P<file>[\w./-]+\.py)::(?P<test>\w+) -->\n(?P<next>[^\n]*)"
)
_FIXED_TIMEOUT = re.compile(r"\btimeout=\d|\bmark\.timeout\b")
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_BENCHMARK = re.compile(r"(?:(minisgl|python -m) bench) ([a-z_]+)")
_COMMAND = re.compile(r"(?:`|\n)minisgl ([a-z]+)")


class Offence(NamedTuple):
    """A line that breaks a rule, and the text in it that breaks the rule."""

    line: int
    text: str


def too_long(text: str) -> list[Offence]:
    """A file with more than MAX_FILE_LINES lines."""
    lines = len(text.splitlines())
    return [Offence(lines, f"{lines} lines")] if lines > MAX_FILE_LINES else []


def exported(text: str) -> list[str] | None:
    """The names in the literal `__all__` of a module; None if it has none."""
    for node in ast.parse(text).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return list(ast.literal_eval(value))
            case ast.AnnAssign(target=ast.Name(id="__all__"), value=ast.expr() as value):
                return list(ast.literal_eval(value))
    return None


def machine_paths(text: str) -> list[Offence]:
    """Paths that exist only on a developer's machine."""
    return _matching_lines(MACHINE_PATH, text)


def registry_hosts(text: str) -> list[Offence]:
    """Host names of package registries and mirrors. The user's configuration chooses these."""
    return _matching_lines(REGISTRY_HOST, text)


def loose_todos(text: str) -> list[Offence]:
    """TODOs without the number of an issue. In Python files ruff's TD rules find them."""
    return _matching_lines(TODO, text)


def fixed_timeouts(text: str) -> list[Offence]:
    """Timeouts that do not grow with the load of the machine, as `tests.patience` does."""
    return _matching_lines(_FIXED_TIMEOUT, text)


def silent_skips(text: str) -> list[Offence]:
    """Skips and expected failures without a reason."""
    tree = ast.parse(text)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = []
    for node in ast.walk(tree):
        name = _dotted(node) if isinstance(node, ast.Attribute) else ""
        if name in SKIPS:
            call = calls.get(id(node))
            if call is None or not _gives_reason(call, SKIPS[name]):
                found.append(Offence(node.lineno, name))
    return found


def commands(text: str) -> set[str]:
    """The commands of a page: `minisgl NAME`, `minisgl bench NAME` and `python -m bench NAME`."""
    code = _FENCED.findall(text) + re.findall(r"`minisgl [^`]*`", _FENCED.sub("", text))
    found = {f"minisgl {name}" for each in code for name in _COMMAND.findall(each)}
    return found | {f"{program} bench {name}" for program, name in _BENCHMARK.findall(text)}


def tested_marks(text: str) -> list[tuple[str, str, bool]]:
    """The marks of tested code blocks: file, test, and whether a code block follows directly."""
    return [(m["file"], m["test"], m["next"].startswith("```")) for m in TESTED_MARK.finditer(text)]


def tested_blocks(text: str) -> Iterator[tuple[str, str]]:
    """The marked code blocks: the name of the test and the text of the block."""
    for mark in TESTED_MARK.finditer(text):
        body = text[mark.end() :].split("\n```", 1)[0]
        yield mark["test"], body.removeprefix("\n") + "\n"


def links(text: str) -> list[tuple[str, str]]:
    """Links of a page into the repository: file ("" is the page itself) and anchor ("" is none)."""
    targets = re.findall(r"\]\((?!https?:)([^)\s]+)\)", _FENCED.sub("", text))
    return [(file, anchor) for file, _, anchor in (target.partition("#") for target in targets)]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes from the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", _FENCED.sub("", text), re.MULTILINE)
    return {_anchor(heading) for heading in headings}


def section(text: str, anchor: str) -> str:
    """The text of a page below the heading of this anchor, with its subsections.

    anchor: "" is the whole page. Returns "" if the page has no such heading.
    """
    if not anchor:
        return text
    # Blanks of the same length keep the places of all headings outside code blocks.
    prose = _FENCED.sub(lambda block: " " * len(block[0]), text)
    headings = list(re.finditer(r"^(#+) (.+)$", prose, re.MULTILINE))
    for number, heading in enumerate(headings):
        if _anchor(heading[2]) == anchor:
            later = (each for each in headings[number + 1 :] if len(each[1]) <= len(heading[1]))
            return text[heading.end() : next((each.start() for each in later), len(text))]
    return ""


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-")


def _gives_reason(call: ast.Call, may_be_first: bool) -> bool:
    reasons = [k.value for k in call.keywords if k.arg == "reason"]
    reasons += call.args[:1] if may_be_first else []
    return any(not isinstance(r, ast.Constant) or bool(r.value) for r in reasons)


def _dotted(node: ast.AST | None) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{_dotted(value)}.{attr}"
    return ""


def _matching_lines(pattern: re.Pattern[str], text: str) -> list[Offence]:
    lines = enumerate(text.splitlines(), start=1)
    return [Offence(number, line.strip()) for number, line in lines if pattern.search(line)]
