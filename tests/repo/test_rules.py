"""Each rule of the repository finds a planted offence, and accepts similar correct text."""

import pytest

from tests.repo import rules

# Forbidden words are written in two parts, so that this file obeys the rules.
HOST = "py" + "pi.org"
HOME = "/ho" + "me/ann/minisgl"

PLANTED = {
    "long-file": (rules.too_long, "x = 1\n" * (rules.MAX_FILE_LINES + 1)),
    "machine-path": (rules.machine_paths, f"cd {HOME}\n"),
    "machine-path-quoted": (rules.machine_paths, f'open("{HOME}")\n'),
    "registry": (rules.registry_hosts, f"pip install -i https://{HOST}/simple x\n"),
    "registry-mirror": (rules.registry_hosts, "https://mir" + "rors.example.edu/debian\n"),
    "timeout": (rules.fixed_timeouts, "process.wait(timeout=60)\n"),
    "timeout-mark": (rules.fixed_timeouts, "@pytest.mark.timeout(60)\n"),
    "skip-mark": (rules.silent_skips, "import pytest\n@pytest.mark.skip\ndef test_a(): ...\n"),
    "skip-empty": (rules.silent_skips, "import pytest\n@pytest.mark.skip()\ndef test_a(): ...\n"),
    "skip-empty-reason": (rules.silent_skips, "import pytest\npytest.skip('')\n"),
    "skipif": (rules.silent_skips, "import pytest\npytestmark = pytest.mark.skipif(a > b)\n"),
    "xfail": (rules.silent_skips, "import pytest\n@pytest.mark.xfail\ndef test_a(): ...\n"),
    "xfail-param": (rules.silent_skips, "import pytest\nx = dict(marks=[pytest.mark.xfail])\n"),
    "xfail-condition": (rules.silent_skips, "import pytest\nx = pytest.mark.xfail(a < b)\n"),
    "todo": (rules.loose_todos, "# TO" + "DO: later\n"),
    "todo-name": (rules.loose_todos, "# TO" + "DO(ann): x\n"),
    "todo-fix": (rules.loose_todos, "# FIX" + "ME\n"),
}

CORRECT = {
    "file-at-the-limit": (rules.too_long, "x = 1\n" * rules.MAX_FILE_LINES),
    "path-in-url": (rules.machine_paths, "https://example.com/work/a and src/home/b\n"),
    "torch-index": (rules.registry_hosts, "https://download.pytorch.org/whl/cpu\n"),
    "timeout-patience": (rules.fixed_timeouts, "process.wait(timeout=patience(60))\n"),
    "skip-reason": (
        rules.silent_skips,
        "import pytest\n@pytest.mark.skipif(x, reason='no GPU')\ndef test_a():\n"
        "    pytest.skip('no such device')\n    pytest.importorskip('a', reason='b')\n",
    ),
    "todo-numbered": (rules.loose_todos, "# TO" + "DO(#12): later\n"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_rule_finds_planted_offence(name):
    rule, text = PLANTED[name]
    assert len(rule(text)) == 1


@pytest.mark.parametrize("name", CORRECT)
def test_rule_accepts_correct_text(name):
    rule, text = CORRECT[name]
    assert rule(text) == []


def test_offence_names_its_line():
    text = "import pytest\n\npytest.skip('')\n"
    assert rules.silent_skips(text) == [rules.Offence(3, "pytest.skip")]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('__all__ = ["a", "b"]\n', ["a", "b"]),
        ("__all__: list[str] = []\n", []),
        ("from x import *\n", None),
    ],
    ids=["plain", "annotated", "absent"],
)
def test_exported_reads_the_literal(text, names):
    assert rules.exported(text) == names


def test_tested_block_is_found_with_its_test_and_body():
    text = "<!-- tested: tests/a.py::test_b -->\n```sh\nls\n```\n<!-- tested: c.py::test_d -->\nx\n"
    assert rules.tested_marks(text) == [
        ("tests/a.py", "test_b", True),
        ("c.py", "test_d", False),
    ]
    assert next(rules.tested_blocks(text)) == ("test_b", "ls\n")


def test_links_and_anchors_in_code_blocks_do_not_count():
    text = "# On a `GPU`, or two\n```sh\n# not this [x](y)\n```\n[a](b.md#c-d) [e](#f) [g](https://h)\n"
    assert rules.links(text) == [("b.md", "c-d"), ("", "f")]
    assert rules.anchors(text) == {"on-a-gpu-or-two"}


def test_a_section_ends_at_the_next_heading_of_its_level():
    text = "# A\n## B c\none\n```sh\n# D\n```\n### E\ntwo\n## F\nthree\n"
    assert rules.section(text, "b-c") == "\none\n```sh\n# D\n```\n### E\ntwo\n"
    assert rules.section(text, "e") == "\ntwo\n"
    assert rules.section(text, "f") == "\nthree\n"
    assert rules.section(text, "d") == ""
    assert rules.section(text, "") == text


def test_commands_are_found_in_code_and_not_in_prose():
    text = (
        "minisgl serves\n`minisgl plan X`\n```sh\nminisgl check\npython -m bench host_hits\n```\n"
    )
    assert rules.commands(text) == {"minisgl plan", "minisgl check", "python -m bench host_hits"}
