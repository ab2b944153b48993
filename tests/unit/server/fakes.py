"""Test doubles of the worker processes. Each keeps a list of the messages that it received."""

import msgspec

from minisgl.core import EngineConfig, FinishReason, ModelFacts, SchedulerConfig
from minisgl.message.messages import StepText, TextUpdate, TokenizeResult
from minisgl.request.call import Call, Caller
from minisgl.request.convert import CallRequest
from minisgl.server.engine import ClientLoad, EngineView
from minisgl.server.observe.metrics import Metrics
from minisgl.settings import Limits, ServerConfig

FACTS = ModelFacts(
    max_seq_len=100,
    vocab_size=50,
    eos_token_ids=(2,),
    kv_capacity_tokens=80,
    page_size=16,
    device="cpu",
    dtype="float32",
    kv_dtype="float32",
)
CONFIG = ServerConfig(
    engine=EngineConfig(model_path="."), scheduler=SchedulerConfig(), served_names=("m", "org/m")
)


async def start(
    engine: EngineView,
    request: CallRequest,
    facts: ModelFacts,
    request_id: str = "",
    client: str = "default",
) -> Call:
    """Open a call, and run it to its first output."""
    call = engine.open(Caller(request_id, client), request, request.num_choices)
    await engine.run(call, facts)
    return call


class Outbox:
    """Keeps the messages that were sent to it."""

    def __init__(self) -> None:
        self.sent: list = []

    def send(self, message: object) -> int:
        self.sent.append(message)
        return len(msgspec.msgpack.encode(message))


class World:
    """An engine client between a fake tokenizer, detokenizer and scheduler."""

    def __init__(self, tokenizers: int = 1, **limits_changed: object) -> None:
        limits = Limits(**{"max_queued_reqs": 100, **limits_changed})
        self.tokenizers = [Outbox() for _ in range(tokenizers)]
        self.detokenizer, self.scheduler, self.grammars = Outbox(), Outbox(), Outbox()
        self.engine = EngineView(
            [box.send for box in self.tokenizers],
            self.detokenizer.send,
            self.scheduler.send,
            self.grammars.send,
            limits,
            Metrics("m"),
        )

    def open(
        self, num_choices: int = 1, request_id: str = "", client: str = "default", priority: int = 0
    ) -> Call:
        """Open a call without a request."""
        return self.engine.open(Caller(request_id, client, priority), None, num_choices)

    def answer(self, ids: bytes = b"\x01\0\0\0", error: str | None = None) -> None:
        """Answer every request to the tokenizers."""
        for box in self.tokenizers:
            for message in box.sent:
                self.engine.receive(
                    TokenizeResult(
                        uid=message.uid, token_ids=ids if error is None else b"", error=error
                    )
                )
            box.sent.clear()

    def update(self, uid: int, text: str = "", **fields: object) -> None:
        values = {"completion_tokens": 1, "prompt_tokens": 1, "cached_tokens": 0, **fields}
        self.engine.receive(StepText(updates=[TextUpdate(uid=uid, text=text, **values)]))

    def finish(self, uid: int, reason: FinishReason = FinishReason.LENGTH) -> None:
        self.update(uid, finish=reason)

    @property
    def is_empty(self) -> bool:
        engine = self.engine
        lines = (engine._tokenizers._texts, engine._tokenizers._images)
        return (
            not engine.open_calls
            and not any(engine.open_choices.values())
            and not any(line.waiting or any(line.sent) for line in lines)
            and not engine._tokenizers._sent
            and not any(engine._grammars._waiting.values())
            and not engine._grammars._sent
            and all(load == ClientLoad() for load in engine.loads.values())
            and all(queue == ClientLoad() for queue in engine.queues.values())
        )
