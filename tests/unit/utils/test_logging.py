"""One record is one line, marked with role and pid."""

import json
import logging
import os
import subprocess
import sys
from typing import Any

import pytest

from minisgl.utils import log_event, setup_logging
from tests.patience import patience


def test_record_is_one_line_with_role_and_pid(capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        setup_logging("tokenizer-0", "info")
        logging.getLogger("minisgl.x").info("asked for %s", "a\nfake line")
        logging.getLogger("minisgl.x").debug("unseen")
        for library in ("httpx", "httpx2", "some.other"):
            logging.getLogger(library).info("unseen")
        root.handlers[0].flush()
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    (line,) = capfd.readouterr().err.splitlines()
    assert f"tokenizer-0[{os.getpid()}]" in line
    assert "a\\nfake line" in line


def test_json_record_is_one_object_with_any_text(capfd: pytest.CaptureFixture[str]) -> None:
    """Fields are members. Text of a client can neither end the line nor replace a member."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    logger = logging.getLogger("minisgl.x")
    try:
        setup_logging("api", "info", "json")
        fields = {"request_id": 'a\n"level": "x', "message": "y", "tokens": 3}
        log_event(logger, logging.INFO, "call ended", **fields)
        try:
            raise ValueError("z")
        except ValueError:
            logger.exception("process failed pid=%d", 7)
        root.handlers[0].flush()
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    ended, failed = (json.loads(line) for line in capfd.readouterr().err.splitlines())
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


SPEAKER = """
import logging, sys
from minisgl.utils import setup_logging
setup_logging("api", "info")
for number in range(5000):
    logging.getLogger("minisgl.x").info("line %d %s", number, "x" * 100)
sys.stdin.readline()
logging.getLogger("minisgl.x").info("last")
"""


def speaker(**streams: Any) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", SPEAKER]
    return subprocess.Popen(command, stdin=subprocess.PIPE, **streams)


def test_stderr_without_a_reader_blocks_nothing_and_lost_lines_are_counted() -> None:
    """Regression: the 35th line of a refused request stopped the event loop for ever."""
    with speaker(stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
        # The process ends without a reader, because the pipe is not read before.
        assert process.wait(patience(60)) == 0
        lines = process.stderr.read().splitlines()
    assert 100 < len(lines) < 5000


def test_lost_lines_are_reported_when_the_reader_comes_back() -> None:
    with speaker(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        found = b""
        while b"log lines lost count=" not in found:
            found += process.stderr.readline()
        process.stdin.write(b"go\n")
        process.stdin.close()
        process.stdin = None
        process.stderr.read()
        assert process.wait(patience(60)) == 0


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_full_disk_does_not_end_the_process(log_format: str) -> None:
    """Regression: the server did not start when stderr was a file on a full disk."""
    code = SPEAKER.replace('"info")', f'"info", "{log_format}")')
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, input=b"go\n", stdout=full, stderr=full, timeout=patience())
    assert done.returncode == 0


@pytest.mark.parametrize("event", ["call refused", "accept failed"])
def test_events_that_clients_cause_are_one_line_per_reason_and_second(
    capfd: pytest.CaptureFixture[str], event: str
) -> None:
    """Regression: one client wrote 183 KB of log lines per second."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    logger = logging.getLogger("minisgl.x")
    try:
        setup_logging("api", "info")
        for second in (100.0, 100.5, 101.5):
            for reason in ("a", "b"):
                for _ in range(50):
                    fields = {"reason": reason, "status": 400}
                    message = event + " status=%(status)s reason=%(reason)s"
                    record = logger.makeRecord("x", logging.INFO, "", 0, message, (fields,), None)
                    record.created = second
                    logger.handle(record)
            log_event(logger, logging.INFO, "call ended", reason="a")
        root.handlers[0].flush()
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    messages = [line.partition(": ")[2] for line in capfd.readouterr().err.splitlines()]
    refused = [f"{event} status=400 reason={reason}" for reason in "ab"]
    later = [f"{message} held_back=99" for message in refused]
    ended = "call ended reason=a"
    assert messages == [*refused, ended, ended, *later, ended]


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
    capfd: pytest.CaptureFixture[str], value: object, shown: str
) -> None:
    """Regression: a request id of a client forged the field `status` of its log line."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        setup_logging("api", "info")
        fields = {"request_id": value, "status": 400}
        log_event(logging.getLogger("minisgl.x"), logging.INFO, "call ended", **fields)
        root.handlers[0].flush()
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith(f"call ended request_id={shown} status=400")
