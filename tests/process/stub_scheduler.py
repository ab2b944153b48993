"""A scheduler without a model that repeats the prompt as its answer, over the real queues.

Modes: echo; loading (never ready); hang (never a step); refuse (each request ends with an error);
broken (a ConfigError while loading).
"""

import os
import sys
import time
from array import array

import msgspec

from minisgl.core import FinishReason, ModelFacts
from minisgl.message import Receiver, Sender, endpoint
from minisgl.message.messages import (
    AbortReq,
    AddReq,
    Finished,
    PrefillDone,
    Ready,
    SchedulerStats,
    Shutdown,
    StepOutput,
    ToScheduler,
)
from minisgl.server.config import ChildSpec
from minisgl.utils.supervise import CONFIG_EXIT, bind_to_parent, read_payload

STEP_S = 0.005
FACTS = ModelFacts(
    max_seq_len=2048,
    vocab_size=100_000,
    eos_token_ids=(2,),
    kv_capacity_tokens=4096,
    page_size=16,
    device="cpu",
    dtype="float32",
)


class _Req:
    def __init__(self, add: AddReq) -> None:
        self.add = add
        self.ids = array("i", add.token_ids)
        self.sent = 0
        self.max_tokens = add.sampling.max_tokens or FACTS.max_seq_len - len(self.ids)


class StubScheduler:
    def __init__(self, mode: str, socket_dir: str) -> None:
        self._mode = mode
        self._inbox: Receiver[ToScheduler] = Receiver(
            endpoint(socket_dir, "scheduler"), ToScheduler
        )
        self._out: Sender[StepOutput] = Sender(endpoint(socket_dir, "detokenizer"))
        self._api: Sender[Ready | SchedulerStats] = Sender(endpoint(socket_dir, "api"))
        self._reqs: dict[int, _Req] = {}
        self._step_id = 0

    def run(self) -> None:
        if self._mode != "loading":
            self._api.send(Ready(role="scheduler", facts=FACTS))
        while True:
            self._inbox.poll(STEP_S if self._reqs else 0.2)
            finished: list[Finished] = []
            for message in self._inbox.drain():
                if isinstance(message, Shutdown):
                    return
                if isinstance(message, AddReq):
                    self._reqs[message.uid] = _Req(message)
                elif isinstance(message, AbortReq) and message.uid in self._reqs:
                    del self._reqs[message.uid]
                    finished.append(Finished(uid=message.uid, reason=message.reason))
            if self._mode != "hang" and (self._reqs or finished):
                time.sleep(STEP_S)
                self._step(finished)
            self._api.send(self._stats())

    def _step(self, finished: list[Finished]) -> None:
        self._step_id += 1
        opened, uids, tokens = [], [], []
        for uid, req in list(self._reqs.items()):
            if req.sent == 0:
                opened.append(
                    PrefillDone(
                        uid=uid, prompt_tokens=len(req.ids), cached_tokens=0, text=req.add.text
                    )
                )
            if self._mode == "refuse":
                finished.append(Finished(uid=uid, reason=FinishReason.ERROR, error="no luck"))
                del self._reqs[uid]
                continue
            uids.append(uid)
            tokens.append(req.ids[req.sent % len(req.ids)])
            req.sent += 1
            if req.sent >= req.max_tokens:
                finished.append(Finished(uid=uid, reason=FinishReason.LENGTH))
                del self._reqs[uid]
        self._out.send(
            StepOutput(
                step_id=self._step_id,
                opened=opened,
                uids=uids,
                token_ids=tokens,
                finished=finished,
            )
        )

    def _stats(self) -> SchedulerStats:
        zeros = {
            name: 0
            for name in SchedulerStats.__struct_fields__
            if name not in ("step_id", "busy", "phases")
        }
        zeros["running_reqs"] = len(self._reqs)
        return SchedulerStats(step_id=self._step_id, busy=bool(self._reqs), **zeros)


def main() -> None:
    mode, life_fd = sys.argv[1], int(sys.argv[-1])
    spec = msgspec.json.decode(read_payload(life_fd), type=ChildSpec)
    bind_to_parent(spec.parent_pid, life_fd)
    if mode == "broken":
        os.write(spec.reason_fd, b"scheduler\tthe model is upside down\n")
        os._exit(CONFIG_EXIT)
    StubScheduler(mode, spec.socket_dir).run()


if __name__ == "__main__":
    main()
