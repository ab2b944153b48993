"""ApiServer: the failure of any of its tasks ends the process."""

import asyncio
import socket
from pathlib import Path

import msgspec
import pytest

from minisgl.core import Overloaded, SamplingParams, WorkerDied
from minisgl.message.messages import AddReq, Ready, SchedulerStats, Shutdown, ToApi
from minisgl.message.queues import Sender, endpoint
from minisgl.request.call import Caller, Submission
from minisgl.server.observe.lifecycle import Phase
from minisgl.server.process import ApiServer
from minisgl.settings.child import ChildSpec
from minisgl.utils.process import write_socket_key
from tests.patience import patience
from tests.unit.server.fakes import CONFIG, FACTS


def api_server(folder: Path, **changed: object) -> ApiServer:
    write_socket_key(folder)
    spec = ChildSpec(
        role="api",
        index=0,
        socket_dir=str(folder),
        reason_fd=-1,
        config=msgspec.structs.replace(CONFIG, **changed),
        url="http://test",
    )
    return ApiServer(spec)


def test_scheduler_without_requests_is_not_hung(tmp_path: Path) -> None:
    """Regression: an idle scheduler was reported as hung while a tokenizer had minutes of work."""
    server = api_server(tmp_path, step_timeout_s=1e-9)
    server.lifecycle.phase = Phase.READY
    call = server.engine.open(Caller())
    assert [server.hung_worker(), server.hung_worker()] == [None, None]
    request = AddReq(uid=call.uid, token_ids=b"", sampling=SamplingParams())
    server.engine.submit(call, Submission(request, ()))
    assert [server.hung_worker(), server.hung_worker()] == [None, "scheduler"]


@pytest.mark.parametrize(("device", "hung"), [("cpu", None), ("cuda", "scheduler")])
def test_a_long_prompt_on_a_cpu_has_more_time_than_one_step(
    tmp_path: Path, device: str, hung: str | None
) -> None:
    server = api_server(tmp_path, step_timeout_s=1e-9)
    server.lifecycle.phase = Phase.READY
    server.lifecycle.facts = msgspec.structs.replace(FACTS, device=device)
    call = server.engine.open(Caller())
    request = AddReq(uid=call.uid, token_ids=bytes(4 * 31_000), sampling=SamplingParams())
    server.engine.submit(call, Submission(request, ()))
    assert [server.hung_worker(), server.hung_worker()] == [None, hung]


@pytest.mark.parametrize("preparing", [False, True])
def test_scheduler_whose_requests_wait_for_their_grammars_is_not_hung(
    tmp_path: Path, preparing: bool
) -> None:
    """Regression: twelve calls whose grammars compiled for a minute ended the service."""

    async def main() -> None:
        server = api_server(tmp_path, step_timeout_s=1e-9)
        heard: list[str] = []
        server._watchdog.heard = lambda role, now_s: heard.append(role)  # type: ignore[method-assign]
        outbox: Sender[ToApi] = Sender(endpoint(str(tmp_path), "api"))
        receiving = asyncio.create_task(server._receive())
        for waiting in range(1, 4):
            stats = SchedulerStats(step_id=7, busy=True, preparing=preparing, waiting_reqs=waiting)
            outbox.send(stats)
        async with asyncio.timeout(patience()):
            while server.stats is None or server.stats.waiting_reqs < 3:
                await asyncio.sleep(0)
        receiving.cancel()
        outbox.close()
        assert heard == ["scheduler"] * (3 if preparing else 1)

    asyncio.run(main())


@pytest.mark.parametrize("named", [False, True])
def test_a_scrape_names_keys_only_with_key_metrics(tmp_path: Path, named: bool) -> None:
    """A scrape needs no key."""
    server = api_server(tmp_path, api_key_hashes={"0" * 64: "search"}, key_metrics=named)
    server.engine.metrics.on_refused(Overloaded("full"), Phase.READY, "search")
    body, _ = server.engine.metrics.render("", Phase.READY, False, {})
    assert (b'key="search"' in body) == named
    counted = b"search" if named else b"other"
    assert b'minisgl_key_rejected_total{key="%s",model_name="m"} 1.0' % counted in body


class _Broken(Exception):
    """An exception that no handler expects."""


def test_dead_receiver_ends_the_process(tmp_path: Path) -> None:
    """Any exception ended the listener of mini-sglang, and every later call hung."""

    async def main() -> None:
        server = api_server(tmp_path)

        def fail(message: Ready) -> bool:
            raise _Broken

        server.lifecycle.on_ready = fail  # type: ignore[method-assign]
        outbox: Sender[ToApi] = Sender(endpoint(str(tmp_path), "api"))
        outbox.send(Ready(role="scheduler", facts=FACTS))
        with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(_Broken):
            await asyncio.wait_for(server.run(listener), timeout=patience())
        call = server.engine.open(Caller())
        server.engine.fail_all(WorkerDied("x"))  # type: ignore[arg-type]
        assert all(choice.finish is not None for choice in call.choices)
        outbox.close()

    asyncio.run(main())


def test_tags_of_messages_are_their_class_names() -> None:
    """The tag of a message is its class name, which the receiver looks up."""
    assert AddReq.__struct_config__.tag == "AddReq"
    assert Shutdown.__struct_config__.tag == "Shutdown"
