"""The API process's own tasks: none of them may die unseen."""

import asyncio
import os
import socket
from pathlib import Path

import msgspec
import pytest

from minisgl.core import SamplingParams, WorkerDied
from minisgl.message import Sender, TextOptions, endpoint
from minisgl.message.messages import AddReq, Ready, Shutdown, ToApi
from minisgl.server.config import ChildSpec
from minisgl.server.lifecycle import Phase
from minisgl.server.process import ApiServer
from tests.unit.server.fakes import CONFIG, FACTS


def api_server(folder: Path, **changed: object) -> ApiServer:
    spec = ChildSpec(
        role="api",
        index=0,
        parent_pid=os.getpid(),
        socket_dir=str(folder),
        reason_fd=-1,
        config=msgspec.structs.replace(CONFIG, **changed),
        url="http://test",
    )
    return ApiServer(spec)


def test_scheduler_hangs_only_over_what_it_was_given(tmp_path: Path) -> None:
    """While a tokenizer had minutes of work, an idle scheduler was taken for one that hangs."""
    server = api_server(tmp_path, step_timeout_s=1e-9)
    server.lifecycle.phase = Phase.READY
    (choice,) = server.client.open(1).choices
    assert [server.stuck(), server.stuck()] == [False, False]
    request = AddReq(uid=choice.uid, token_ids=b"", sampling=SamplingParams())
    server.client.submit(choice, request, TextOptions(), 0)
    assert [server.stuck(), server.stuck()] == [False, True]


class _Broken(Exception):
    """What no handler expects."""


def test_dead_receiver_ends_the_process(tmp_path: Path) -> None:
    """W27: mini-sglang's listener died on any exception, and every client hung from then on."""

    async def main() -> None:
        server = api_server(tmp_path)

        def fail(message: Ready) -> bool:
            raise _Broken

        server.lifecycle.on_ready = fail  # type: ignore[method-assign]
        outbox: Sender[ToApi] = Sender(endpoint(str(tmp_path), "api"))
        outbox.send(Ready(role="scheduler", facts=FACTS))
        with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(_Broken):
            await asyncio.wait_for(server.run(listener), timeout=60)
        generation = server.client.open(1)
        server.client.fail_all(WorkerDied("x"))  # type: ignore[arg-type]
        assert generation.finished()
        outbox.close()

    asyncio.run(main())


def test_messages_type_names_match_what_the_scheduler_reads() -> None:
    """The tags on the wire are the class names; renaming one would break the other end."""
    assert AddReq.__struct_config__.tag == "AddReq"
    assert Shutdown.__struct_config__.tag == "Shutdown"
