"""A scheduler process without an engine: it answers each request with its own prompt, repeated.

It speaks the same messages as the real one. Modes:

    echo     answer
    loading  never become ready
    hang     become ready, and never run a step
    refuse   end each request with an error
    broken   fail while loading, as a ConfigError does

The mode may also be the path of a JSON file with rules, each a pair of texts. The answer to a
request is the second text of the first rule whose first text occurs in the prompt.
"""

import json
import os
import sys
import time
from array import array
from pathlib import Path

import msgspec

from minisgl.core import FinishReason, ModelFacts
from minisgl.images import image_spec
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
from minisgl.message.queues import Receiver, Sender, endpoint
from minisgl.settings.child import ChildSpec
from minisgl.tokenizer.tokenizer import TextTokenizer
from minisgl.utils.supervise import CONFIG_EXIT, bind_to_parent

STEP_S = 0.005
FACTS = ModelFacts(
    max_seq_len=2048,
    vocab_size=100_000,
    eos_token_ids=(2,),
    kv_capacity_tokens=4096,
    page_size=16,
    device="cpu",
    dtype="float32",
    kv_dtype="float32",
)


# A scripted answer is for clients whose prompts are long.
SCRIPT_FACTS = msgspec.structs.replace(FACTS, max_seq_len=1_000_000, kv_capacity_tokens=1_000_000)


class _Req:
    """prompt_tokens: length of the prompt. ids: the tokens to answer, over and over."""

    def __init__(self, add: AddReq) -> None:
        ids = array("i", add.token_ids)
        self.ids = array("i", [token for token in ids if token >= 0])  # without pads of images
        self.prompt_tokens = len(ids)
        self.sent = 0
        self.prefill_done = False
        self.max_tokens = add.sampling.max_tokens or FACTS.max_seq_len - len(self.ids)
        self.reason = FinishReason.LENGTH


class _Script:
    """The answers of a JSON file."""

    def __init__(self, path: Path, model_path: str) -> None:
        self._rules = json.loads(path.read_text())
        self._tokenizer = TextTokenizer(model_path)

    def prepare(self, req: _Req, add: AddReq) -> None:
        """Replace the answer of a request."""
        prompt = self._tokenizer.vocabulary.decode(req.ids.tolist(), skip_special=False)
        answer = next(answer for text, answer in self._rules if text in prompt)
        ids = [*self._tokenizer.encode_text(answer), *FACTS.eos_token_ids]
        if add.sampling.max_tokens is None or len(ids) <= add.sampling.max_tokens:
            req.max_tokens, req.reason = len(ids), FinishReason.STOP
        req.ids = array("i", ids)


class StubScheduler:
    def __init__(self, mode: str, socket_dir: str, model_path: str) -> None:
        self._mode = mode
        self._images = image_spec(model_path) is not None
        is_script = mode.endswith(".json")
        self._script = _Script(Path(mode), model_path) if is_script else None
        self._inbox: Receiver[ToScheduler] = Receiver(
            endpoint(socket_dir, "scheduler"), ToScheduler
        )
        self._out: Sender[StepOutput] = Sender(endpoint(socket_dir, "detokenizer"))
        self._api: Sender[Ready | SchedulerStats] = Sender(endpoint(socket_dir, "api"))
        self._reqs: dict[int, _Req] = {}
        self._step_id = 0

    def run(self) -> None:
        if self._mode != "loading":
            facts = FACTS if self._script is None else SCRIPT_FACTS
            facts = msgspec.structs.replace(facts, images=self._images)
            self._api.send(Ready(role="scheduler", facts=facts))
        while True:
            self._inbox.poll(STEP_S if self._reqs else 0.2)
            output = StepOutput(step_id=self._step_id + 1)
            for message in self._inbox.drain():
                if isinstance(message, Shutdown):
                    return
                if isinstance(message, AddReq):
                    for uid in range(message.uid, message.uid + message.count):
                        self._reqs[uid] = _Req(message)
                        if self._script is not None:
                            self._script.prepare(self._reqs[uid], message)
                elif isinstance(message, AbortReq) and message.uid in self._reqs:
                    self._finish(output, message.uid, message.reason)
            if self._mode != "hang" and (self._reqs or output.finished):
                time.sleep(STEP_S)
                self._step(output)
            self._api.send(self._stats())

    def _step(self, output: StepOutput) -> None:
        """Give every request its next token, and send the output."""
        self._step_id += 1
        for uid, req in list(self._reqs.items()):
            if self._mode == "refuse":
                self._finish(output, uid, FinishReason.ERROR, "no luck")
                continue
            self._open(output, uid)
            output.uids.append(uid)
            output.token_ids.append(req.ids[req.sent % len(req.ids)])
            req.sent += 1
            if req.sent >= req.max_tokens:
                self._finish(output, uid, req.reason)
        self._out.send(output)

    def _open(self, output: StepOutput, uid: int) -> None:
        """Send PrefillDone, unless it has been sent."""
        req = self._reqs[uid]
        if not req.prefill_done:
            req.prefill_done = True
            done = PrefillDone(uid=uid, prompt_tokens=req.prompt_tokens, cached_tokens=0)
            output.prefill_done.append(done)

    def _finish(
        self, output: StepOutput, uid: int, reason: FinishReason, error: str | None = None
    ) -> None:
        self._open(output, uid)
        del self._reqs[uid]
        output.finished.append(Finished(uid=uid, reason=reason, error=error))

    def _stats(self) -> SchedulerStats:
        busy = bool(self._reqs)
        return SchedulerStats(step_id=self._step_id, busy=busy, running_reqs=len(self._reqs))


def main() -> None:
    bind_to_parent()
    mode = sys.argv[1]
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=ChildSpec)
    if mode == "broken":
        os.write(spec.reason_fd, b"scheduler\tthe model is upside down\n")
        os._exit(CONFIG_EXIT)
    if spec.index == 0:
        spec.report_checked()
    StubScheduler(mode, spec.socket_dir, spec.config.engine.model_path).run()


if __name__ == "__main__":
    main()
