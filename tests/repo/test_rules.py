"""Each rule of the repository finds a planted offence, and leaves its honest neighbour alone."""

import pytest

from tests.repo import rules

# The parts of what is forbidden stand apart here, so that this file itself stays clean.
HOST = "py" + "pi.org"
HOME = "/ho" + "me/ann/minisgl"

PLANTED = {
    "print": (rules.prints, "def f():\n    print(1)\n"),
    "pickle": (rules.unsafe_loads, "import pickle\n"),
    "pickle-from": (rules.unsafe_loads, "from cloudpickle import loads\n"),
    "pickle-submodule": (rules.unsafe_loads, "import numpy, cloudpickle.compat\n"),
    "eval": (rules.unsafe_loads, "x = eval('1')\n"),
    "eval-alias": (rules.unsafe_loads, "run = eval\n"),
    "recv_pyobj": (rules.unsafe_loads, "message = socket.recv_pyobj()\n"),
    "torch.load": (rules.unsafe_loads, "import torch\nw = torch.load('a')\n"),
    "except-exception": (rules.broad_excepts, "try:\n    f()\nexcept Exception:\n    pass\n"),
    "except-bare": (rules.broad_excepts, "try:\n    f()\nexcept:\n    g()\n"),
    "except-tuple": (rules.broad_excepts, "try:\n    f()\nexcept (OSError, Exception):\n    g()\n"),
    "except-other-raise": (
        rules.broad_excepts,
        "try:\n    f()\nexcept BaseException as e:\n    raise ValueError from e\n",
    ),
    "long-file": (rules.too_long, "x = 1\n" * (rules.MAX_FILE_LINES + 1)),
    "machine-path": (rules.machine_paths, f"cd {HOME}\n"),
    "machine-path-quoted": (rules.machine_paths, f'open("{HOME}")\n'),
    "private-patched": (rules.private_attributes, "self._wrapper._kv_lens_buffer = lens\n"),
    "registry": (rules.registry_hosts, f"pip install -i https://{HOST}/simple x\n"),
    "registry-mirror": (rules.registry_hosts, "https://mir" + "rors.example.edu/debian\n"),
    "skip-mark": (rules.silent_skips, "import pytest\n@pytest.mark.skip\ndef test_a(): ...\n"),
    "skip-empty": (rules.silent_skips, "import pytest\n@pytest.mark.skip()\ndef test_a(): ...\n"),
    "skip-empty-reason": (rules.silent_skips, "import pytest\npytest.skip('')\n"),
    "skipif": (rules.silent_skips, "import pytest\npytestmark = pytest.mark.skipif(a > b)\n"),
    "xfail": (rules.silent_skips, "import pytest\n@pytest.mark.xfail\ndef test_a(): ...\n"),
    "xfail-param": (rules.silent_skips, "import pytest\nx = dict(marks=[pytest.mark.xfail])\n"),
    "xfail-condition": (rules.silent_skips, "import pytest\nx = pytest.mark.xfail(a < b)\n"),
    "todo": (lambda text: rules.loose_todos(text, python=True), "x = 1  # TO" + "DO: later\n"),
    "todo-name": (lambda text: rules.loose_todos(text, python=True), "# TO" + "DO(ann): x\n"),
    "todo-shell": (lambda text: rules.loose_todos(text, python=False), "# FIX" + "ME\n"),
}

HONEST = {
    "print-in-docstring": (rules.prints, '"""Never print(this)."""\nlogger.info("x")\n'),
    "model-eval": (rules.unsafe_loads, "model.eval()\n"),
    "pickle-in-words": (rules.unsafe_loads, '"""No pickle, no eval."""\n'),
    "torch.load-safe": (rules.unsafe_loads, "torch.load('a', weights_only=True)\n"),
    "except-narrow": (
        rules.broad_excepts,
        "try:\n    f()\nexcept (OSError, ValueError):\n    g()\n",
    ),
    "except-clean-up": (
        rules.broad_excepts,
        "try:\n    f()\nexcept BaseException:\n    g()\n    raise\n",
    ),
    "private-of-its-own": (rules.private_attributes, "self._a = tile._replace(b=1).__len__()\n"),
    "file-at-the-limit": (rules.too_long, "x = 1\n" * rules.MAX_FILE_LINES),
    "path-in-url": (rules.machine_paths, "https://example.com/work/a and src/home/b\n"),
    "torch-index": (rules.registry_hosts, "https://download.pytorch.org/whl/cpu\n"),
    "skip-reason": (
        rules.silent_skips,
        "import pytest\n@pytest.mark.skipif(x, reason='no GPU')\ndef test_a():\n"
        "    pytest.skip('no such device')\n    pytest.importorskip('a', reason='b')\n",
    ),
    "todo-numbered": (
        lambda text: rules.loose_todos(text, python=True),
        "# TO" + "DO(#12): later\nwords = 'TO" + "DO'\n",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_rule_finds_planted_offence(name):
    rule, text = PLANTED[name]
    assert len(rule(text)) == 1


@pytest.mark.parametrize("name", HONEST)
def test_rule_leaves_honest_text_alone(name):
    rule, text = HONEST[name]
    assert rule(text) == []


def test_offence_names_its_line():
    assert rules.prints("x = 1\n\nprint(x)\n") == [rules.Offence(3, "print")]


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


def test_links_and_anchors_are_those_outside_of_code_blocks():
    text = "# On a `GPU`, or two\n```sh\n# not this [x](y)\n```\n[a](b.md#c-d) [e](#f) [g](https://h)\n"
    assert rules.links(text) == [("b.md", "c-d"), ("", "f")]
    assert rules.anchors(text) == {"on-a-gpu-or-two"}
