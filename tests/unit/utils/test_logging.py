"""One record is one line, marked with role and pid."""

import io
import logging
import os

import pytest

from minisgl.utils import setup_logging


def test_record_is_one_line_with_role_and_pid(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = io.StringIO()
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    monkeypatch.setattr("sys.stderr", sink)
    try:
        setup_logging("tokenizer-0", "info")
        logging.getLogger("minisgl.x").info("asked for %s", "a\nfake line")
        logging.getLogger("minisgl.x").debug("unseen")
        logging.getLogger("httpx").info("unseen")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    (line,) = sink.getvalue().splitlines()
    assert f"tokenizer-0[{os.getpid()}]" in line
    assert "a\\nfake line" in line
