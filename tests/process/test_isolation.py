"""A busy tokenizer does not delay tokens that are being streamed."""

import os
import signal

import psutil
import pytest

from tests.process.harness import run_server, wait_for

pytestmark = pytest.mark.process


def test_streams_go_on_while_the_tokenizer_is_busy() -> None:
    """One process tokenized and detokenized, so a long prompt delayed every stream's tokens.

    Here the tokenizer is stopped, as if its prompt never ended.
    """
    with run_server("--num-pages", "512") as server:
        client = server.wait_ready().client()
        messages = [{"role": "user", "content": "Spell the word planet."}]
        stream = client.chat.completions.create(
            model="minisgl-demo",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=300,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        events = iter(stream)
        next(events)
        tokenizer = server.child_pid("tokenizer-0")
        os.kill(tokenizer, signal.SIGSTOP)
        try:
            wait_for(
                lambda: psutil.Process(tokenizer).status() == psutil.STATUS_STOPPED, "the stop"
            )
            reasons = [chunk.choices[0].finish_reason for chunk in events if chunk.choices]
            assert psutil.Process(tokenizer).status() == psutil.STATUS_STOPPED
        finally:
            os.kill(tokenizer, signal.SIGCONT)
        assert reasons[-1] == "length", "all tokens arrive while the tokenizer is stopped"
        assert (
            client.chat.completions.create(
                model="minisgl-demo",
                messages=messages,  # type: ignore[arg-type]
                temperature=0,
            )
            .choices[0]
            .message.content
            == "p-l-a-n-e-t"
        )
