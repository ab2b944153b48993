"""Errors of a JSON file of a model folder."""

from pathlib import Path

import pytest

from minisgl.core import ConfigError
from minisgl.core.files import read_json


def test_deeply_nested_json_gives_a_one_line_error(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("[" * 200_000)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: .* nested too deeply"):
        read_json(path)
