"""`BlockWriter`: writes one answer as a sequence of blocks.

Both APIs give an answer as a list of blocks of reasoning, text and tool calls. A stream announces
each block, sends its text in pieces, and closes it before the next block begins.
"""

import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from minisgl.core import FinishReason
from minisgl.request.call import Call
from minisgl.request.choice import Choice, Details
from minisgl.request.convert import CallRequest

Kind = Literal["reasoning", "text", "call"]


@dataclass(eq=False, slots=True)
class Block:
    """One block of an answer.

    index        position of the block in the answer.
    call_id, name
                 id and name of a tool call; otherwise "".
    pieces       the text of the block, or the JSON text of the arguments of a call.
    is_complete  a later block has begun, or the answer has ended by itself.
    """

    kind: Kind
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    is_complete: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class BlockWriter(ABC):
    """Writes the answer to a request with one choice.

    id: the id of the answer. blocks: the blocks that have begun. All but the last are complete.
    """

    keep_alive: bytes
    id_prefix: str

    def __init__(self, request: CallRequest) -> None:
        self.request = request
        self.id = self.id_prefix + uuid.uuid4().hex
        self.blocks: list[Block] = []
        self._before = b""  # the bytes of an event with new text, up to its text

    async def whole(self, call: Call) -> bytes:
        """The JSON body of an answer without stream. The call has ended."""
        (choice,) = call.choices
        text, details = call.take(0)
        self.details_chunk(choice, text, details or Details())
        self._close(choice.finish is FinishReason.STOP)
        return msgspec.json.encode(self.answer(choice))

    def text_chunk(self, index: int, text: str) -> bytes:
        """The events for new text and nothing else."""
        return self._add("text", text)

    def details_chunk(self, choice: Choice, text: str, details: Details) -> bytes:
        """The events for new reasoning, text and tool calls.

        The details may hold the output of several steps. The rest of a call that has begun comes
        first, because the next block closes the call. Text comes before new calls.
        """
        calls = list(details.calls)
        parts = []
        while calls and not calls[0].name:
            parts.append(self._add("call", calls.pop(0).arguments))
        if details.reasoning:
            parts.append(self._add("reasoning", "".join(details.reasoning)))
        if text:
            parts.append(self._add("text", text))
        for call in calls:
            parts.append(self._begin("call", call.id, call.name) if call.name else b"")
            parts.append(self._add("call", call.arguments) if call.arguments else b"")
        return b"".join(parts)

    def last_chunk(self, choice: Choice) -> bytes:
        """The events at the end of the answer."""
        return self._close(choice.finish is FinishReason.STOP) + self.ended(choice)

    def end_chunk(self, call: Call) -> bytes:
        """Return no event. The last event of the answer has the usage, and no [DONE] follows."""
        return b""

    def _add(self, kind: Kind, text: str) -> bytes:
        """Add text to the last block, or to a new block if the last is of another kind."""
        begun = b""
        if not self.blocks or self.blocks[-1].kind != kind:
            assert kind != "call", "the name of a call must come first; this is a bug"
            begun = self._begin(kind)
        block = self.blocks[-1]
        block.pieces.append(text)
        return begun + self.added(block, text)

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> bytes:
        closed = self._close(True)
        block = Block(kind, len(self.blocks), call_id, name)
        self.blocks.append(block)
        return closed + self.begun(block)

    def _close(self, is_complete: bool) -> bytes:
        """End the last block. is_complete: False if the answer was cut within this block."""
        if not self.blocks:
            return b""
        block = self.blocks[-1]
        block.is_complete = is_complete
        return self.closed(block)

    @abstractmethod
    def answer(self, choice: Choice) -> msgspec.Struct:
        """The body of the whole answer."""

    @abstractmethod
    def begun(self, block: Block) -> bytes:
        """The events that announce a block."""

    @abstractmethod
    def added(self, block: Block, text: str) -> bytes:
        """The event with new text of the last block. It is the most frequent event."""

    @abstractmethod
    def closed(self, block: Block) -> bytes:
        """The events that end a block."""

    @abstractmethod
    def ended(self, choice: Choice) -> bytes:
        """The events at the end of an answer."""


def sse(kind: str, event: msgspec.Struct) -> bytes:
    """One server-sent event with its name."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(event))
