"""Test doubles of the worker processes. Each keeps a list of the messages that it received."""

import msgspec

from minisgl.core import EngineConfig, FinishReason, ModelFacts, SchedulerConfig
from minisgl.message.messages import StepText, TextUpdate, TokenizeResult
from minisgl.server.engine import ClientLoad, EngineClient
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
        self.client = EngineClient(
            [box.send for box in self.tokenizers],
            self.detokenizer.send,
            self.scheduler.send,
            self.grammars.send,
            limits,
            Metrics("m"),
        )

    def answer(self, ids: bytes = b"\x01\0\0\0", error: str | None = None) -> None:
        """Answer every request to the tokenizers."""
        for box in self.tokenizers:
            for message in box.sent:
                self.client.receive_tokenize_result(
                    TokenizeResult(
                        uid=message.uid, token_ids=ids if error is None else b"", error=error
                    )
                )
            box.sent.clear()

    def update(self, uid: int, text: str = "", **fields: object) -> None:
        values = {"completion_tokens": 1, "prompt_tokens": 1, "cached_tokens": 0, **fields}
        self.client.receive_text(StepText(updates=[TextUpdate(uid=uid, text=text, **values)]))

    def finish(self, uid: int, reason: FinishReason = FinishReason.LENGTH) -> None:
        self.update(uid, finish=reason)

    @property
    def is_empty(self) -> bool:
        client = self.client
        return (
            not client.open_generations
            and not any(client.open_choices.values())
            and not any(client._tokenizers._waiting.values())
            and not client._tokenizers._sent
            and not any(client._tokenizers._outstanding_bytes)
            and not any(client._grammars._waiting.values())
            and not client._grammars._sent
            and all(load == ClientLoad() for load in client.loads.values())
            and all(queue == ClientLoad() for queue in client.queues.values())
        )
