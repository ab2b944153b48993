"""The API process's own tasks: none of them may die unseen."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from minisgl.core import WorkerDied
from minisgl.message import Sender, endpoint
from minisgl.message.wire import AddReq, Ready, Shutdown, ToApi
from minisgl.server.api import ApiServer
from minisgl.server.config import ChildSpec
from tests.unit.server.fakes import CONFIG, FACTS


def api_server(folder: Path) -> ApiServer:
    spec = ChildSpec(
        role="api",
        index=0,
        parent_pid=os.getpid(),
        socket_dir=str(folder),
        reason_fd=-1,
        config=CONFIG,
        url="http://test",
    )
    return ApiServer(spec)


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
        assert generation.finished
        outbox.close()

    asyncio.run(main())


def test_messages_type_names_match_what_the_scheduler_reads() -> None:
    """The tags on the wire are the class names; renaming one would break the other end."""
    assert AddReq.__struct_config__.tag == "AddReq"
    assert Shutdown.__struct_config__.tag == "Shutdown"
