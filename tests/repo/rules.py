"""The repository's own lint rules: pure functions from a file's text to what offends in it.

They know nothing of where the files are; test_repository.py applies them, test_rules.py plants
offences in them.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

MAX_FILE_LINES = 400

# Ways to turn bytes from elsewhere into running code.
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle"}
UNSAFE_NAMES = {"eval", "exec"}
UNSAFE_ATTRIBUTES = {"recv_pyobj", "send_pyobj"}

MACHINE_PATH = re.compile(r"(?<![\w./:])/(?:work|farm|home|Users|root)/")
_REGISTRIES = ("pypi", "pythonhosted", "npmjs", "yarnpkg", "debian", "ubuntu", "anaconda", "golang")
REGISTRY_HOST = re.compile(
    rf"\b(?:{'|'.join(_REGISTRIES)})\.(?:org|com)\b|\bcrates\.io\b|\bmirrors?\.[\w-]+\.\w+",
    re.IGNORECASE,
)
TODO = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b(?!\(#\d+\):)")
# Ways to skip a test or to expect its failure, and whether the first argument may be the reason.
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
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


class Offence(NamedTuple):
    """What offends and in which line."""

    line: int
    what: str


def too_long(text: str) -> list[Offence]:
    """A file longer than anybody reads in one go."""
    lines = len(text.splitlines())
    return [Offence(lines, f"{lines} lines")] if lines > MAX_FILE_LINES else []


def prints(text: str) -> list[Offence]:
    """Calls of print."""
    return [
        Offence(node.lineno, "print")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and _dotted(node.func) == "print"
    ]


def unsafe_loads(text: str) -> list[Offence]:
    """Unpickling in any form, eval and exec."""
    found = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=names):
                used = {alias.name.split(".")[0] for alias in names} & UNSAFE_MODULES
            case ast.ImportFrom(module=str(module)):
                used = {module.split(".")[0]} & UNSAFE_MODULES
            case ast.Name(id=name):
                used = {name} & UNSAFE_NAMES
            case ast.Attribute(attr=name):
                used = {name} & UNSAFE_ATTRIBUTES
            case ast.Call(func=func, keywords=keywords) if _dotted(func) == "torch.load":
                used = set() if "weights_only" in {k.arg for k in keywords} else {"torch.load"}
            case _:
                continue
        found += [Offence(node.lineno, name) for name in sorted(used)]
    return found


def broad_excepts(text: str) -> list[Offence]:
    """Handlers of everything, but for those that clean up and raise it again."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        match node.type:
            case None:
                caught = {"bare except"}
            case ast.Tuple(elts=elts):
                caught = {_dotted(e) for e in elts} & {"Exception", "BaseException"}
            case single:
                caught = {_dotted(single)} & {"Exception", "BaseException"}
        last = node.body[-1]
        raises_again = isinstance(last, ast.Raise) and last.exc is None
        if caught and not raises_again:
            found.append(Offence(node.lineno, ", ".join(sorted(caught))))
    return found


def private_attributes(text: str) -> list[Offence]:
    """Attributes that somebody else keeps for himself; a NamedTuple's methods are no such thing."""
    return [
        Offence(node.lineno, ast.unparse(node))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and re.match(r"_(?!_)", node.attr)
        and node.attr not in ("_make", "_replace", "_asdict")
        and ast.unparse(node.value) not in ("self", "cls")
    ]


def exported(text: str) -> list[str] | None:
    """The names in a module's literal `__all__`, None when it has none."""
    for node in ast.parse(text).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return list(ast.literal_eval(value))
            case ast.AnnAssign(target=ast.Name(id="__all__"), value=ast.expr() as value):
                return list(ast.literal_eval(value))
    return None


def machine_paths(text: str) -> list[Offence]:
    """Paths that exist on somebody's machine only."""
    return _matching_lines(MACHINE_PATH, text)


def registry_hosts(text: str) -> list[Offence]:
    """Hosts of package registries and mirrors: which one is used is the user's configuration."""
    return _matching_lines(REGISTRY_HOST, text)


def loose_todos(text: str, python: bool) -> list[Offence]:
    """TODOs without the number of an issue; in Python they count in comments only."""
    if not python:
        return _matching_lines(TODO, text)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [
        Offence(token.start[0], token.string)
        for token in tokens
        if token.type == tokenize.COMMENT and TODO.search(token.string)
    ]


def silent_skips(text: str) -> list[Offence]:
    """Skips and expected failures that do not say why."""
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


def tested_marks(text: str) -> list[tuple[str, str, bool]]:
    """The marks of tested code blocks: file, test, and whether a code block follows at once."""
    return [(m["file"], m["test"], m["next"].startswith("```")) for m in TESTED_MARK.finditer(text)]


def tested_blocks(text: str) -> Iterator[tuple[str, str]]:
    """The marked code blocks: name of the test, text of the block."""
    for mark in TESTED_MARK.finditer(text):
        body = text[mark.end() :].split("\n```", 1)[0]
        yield mark["test"], body.removeprefix("\n") + "\n"


def links(text: str) -> list[tuple[str, str]]:
    """Where a page links to in the repository: file ("": the page itself), anchor ("": none)."""
    targets = re.findall(r"\]\((?!https?:)([^)\s]+)\)", _FENCED.sub("", text))
    return [(file, anchor) for file, _, anchor in (target.partition("#") for target in targets)]


def anchors(text: str) -> set[str]:
    """Those that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", _FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


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
