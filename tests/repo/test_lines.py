"""The count of code lines, and the numbers in the README."""

import re

import pytest

from tests.repo.test_repository import read
from tools import lines

SOURCE = '''"""A docstring
of two lines."""

# A comment.
import os  # a comment beside code


def name(
    first: int,
) -> str:
    """Return a text."""
    return """not a
    docstring"""
'''


def test_code_lines_leave_out_blank_lines_comments_and_docstrings():
    assert lines.code_lines(SOURCE) == 6


def test_every_pattern_of_a_feature_matches_a_file():
    patterns = [pattern for each in lines.FEATURES.values() for pattern in each]
    assert [each for each in patterns if not [*lines.PACKAGE.glob(each)]] == []


def test_readme_has_the_sizes_of_the_core_the_package_and_the_kernels():
    words = re.search(
        r"has some ([\d,]+) lines.*?has some ([\d,]+),\D+([\d,]+)", read("README.md"), re.S
    )
    stated = [int(number.replace(",", "")) for number in words.groups()]
    counted, _ = lines.counted()
    core = sum(counted[package] for package in lines.core_packages())
    assert stated == [
        pytest.approx(n, rel=0.05) for n in (core, counted.total(), counted["kernel"])
    ]
