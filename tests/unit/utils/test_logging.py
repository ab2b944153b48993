"""One record is one line, marked with role and pid."""

import io
import json
import logging
import os

import pytest

from minisgl.utils import log_event, setup_logging


def test_record_is_one_line_with_role_and_pid(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = io.StringIO()
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    monkeypatch.setattr("sys.stderr", sink)
    try:
        setup_logging("tokenizer-0", "info")
        logging.getLogger("minisgl.x").info("asked for %s", "a\nfake line")
        logging.getLogger("minisgl.x").debug("unseen")
        for library in ("httpx", "httpx2", "some.other"):
            logging.getLogger(library).info("unseen")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    (line,) = sink.getvalue().splitlines()
    assert f"tokenizer-0[{os.getpid()}]" in line
    assert "a\\nfake line" in line


def test_json_record_is_one_object_with_any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields are members. Text of a client can neither end the line nor replace a member."""
    sink = io.StringIO()
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    monkeypatch.setattr("sys.stderr", sink)
    logger = logging.getLogger("minisgl.x")
    try:
        setup_logging("api", "info", "json")
        fields = {"request_id": 'a\n"level": "x', "message": "y", "tokens": 3}
        log_event(logger, logging.INFO, "call ended", **fields)
        try:
            raise ValueError("z")
        except ValueError:
            logger.exception("process failed pid=%d", 7)
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    ended, failed = (json.loads(line) for line in sink.getvalue().splitlines())
    assert ended["request_id"] == fields["request_id"]
    assert (ended["tokens"], ended["level"], ended["role"]) == (3, "info", "api")
    assert ended["pid"] == os.getpid()
    assert ended["message"].startswith("call ended request_id=a\n")
    assert ended["time"].endswith("Z")
    assert failed["message"] == "process failed pid=7"
    assert failed["exception"].endswith("ValueError: z")


def test_event_is_a_phrase_and_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    log_event(logging.getLogger("minisgl.x"), logging.WARNING, "slow", seconds=1.5, why="100 %s")
    assert caplog.messages == ["slow seconds=1.5 why=100 %s"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain-1.5", "plain-1.5"),
        (3, "3"),
        (None, "None"),
        ("", '""'),
        ("a b", '"a b"'),
        ("x status=200", '"x status=200"'),
        ('a"', r'"a\""'),
        ("a\nb", r'"a\nb"'),
        ("\x1b[2J", r'"\u001b[2J"'),
        ("\x9b2J", r'"\u009b2J"'),
    ],
)
def test_value_that_is_not_one_plain_word_is_quoted(
    monkeypatch: pytest.MonkeyPatch, value: object, shown: str
) -> None:
    """Regression: a request id of a client forged the field `status` of its log line."""
    sink = io.StringIO()
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    monkeypatch.setattr("sys.stderr", sink)
    try:
        setup_logging("api", "info")
        fields = {"request_id": value, "status": 400}
        log_event(logging.getLogger("minisgl.x"), logging.INFO, "call refused", **fields)
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    (line,) = sink.getvalue().splitlines()
    assert line.endswith(f"call refused request_id={shown} status=400")
