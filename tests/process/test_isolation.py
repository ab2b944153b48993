"""A busy tokenizer does not delay tokens that are being streamed."""

import os
import signal

import psutil
import pytest

from tests.process.harness import ServerProcess, wait_for

pytestmark = pytest.mark.process


def test_streams_go_on_while_the_tokenizer_is_busy(stub_server: ServerProcess) -> None:
    """One process tokenized and detokenized, so a long prompt delayed every stream's tokens.

    Here the tokenizer is stopped, as if its prompt never ended.
    """
    completions = stub_server.client().completions
    stream = completions.create(model="tiny", prompt="one two", max_tokens=300, stream=True)
    events = iter(stream)
    next(events)
    tokenizer = stub_server.child_pid("tokenizer-0")
    os.kill(tokenizer, signal.SIGSTOP)
    try:
        wait_for(lambda: psutil.Process(tokenizer).status() == psutil.STATUS_STOPPED, "the stop")
        reasons = [chunk.choices[0].finish_reason for chunk in events if chunk.choices]
        assert psutil.Process(tokenizer).status() == psutil.STATUS_STOPPED
    finally:
        os.kill(tokenizer, signal.SIGCONT)
    assert reasons[-1] == "length", "all tokens arrive while the tokenizer is stopped"
    assert completions.create(model="tiny", prompt="one", max_tokens=3).choices[0].text
