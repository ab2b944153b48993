"""Writes answers in the form of Anthropic's Messages API."""

import uuid
from typing import Any

import msgspec

from minisgl.core import FinishReason
from minisgl.server.apis.blocks import Block, BlockWriter, sse
from minisgl.server.convert import GenerateRequest
from minisgl.server.errors import messages_error
from minisgl.server.generation import Choice, Generation
from minisgl.server.protocol import messages_api as api


class MessagesWriter(BlockWriter):
    """Writes the answer to a request of the Messages API."""

    keep_alive = b'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, request: GenerateRequest) -> None:
        super().__init__(request)
        self._id = f"msg_{uuid.uuid4().hex}"
        self._before = b""  # the bytes of an event with new text, up to its text

    def answer(self, choice: Choice) -> api.ModelMessage:
        content = [_content(block, block.text) for block in self.blocks]
        return self._message(choice, content, *_end(choice))

    def first_chunk(self, choice: Choice, generation: Generation) -> bytes:
        return sse(
            "message_start",
            api.MessagesEvent(type="message_start", message=self._message(choice, [])),
        )

    def begun(self, block: Block) -> bytes:
        delta, field = _DELTAS[block.kind]
        self._before = b'event: content_block_delta\ndata: {"type":"content_block_delta",'
        self._before += b'"index":%d,"delta":{"type":"%b","%b":' % (block.index, delta, field)
        kind = "content_block_start"
        content = _content(block, "")
        return sse(kind, api.MessagesEvent(type=kind, index=block.index, content_block=content))

    def added(self, block: Block, text: str) -> bytes:
        return b"%b%b}}\n\n" % (self._before, msgspec.json.encode(text))

    def closed(self, block: Block) -> bytes:
        kind = "content_block_stop"
        return sse(kind, api.MessagesEvent(type=kind, index=block.index))

    def ended(self, choice: Choice) -> bytes:
        reason, text = _end(choice)
        kind, delta = "message_delta", api.MessagesDelta(stop_reason=reason, stop_sequence=text)
        end = sse(kind, api.MessagesEvent(type=kind, delta=delta, usage=_usage(choice)))
        return end + sse("message_stop", api.MessagesEvent(type="message_stop"))

    def error_chunk(self, error: BaseException) -> bytes:
        return sse("error", messages_error(error))

    def _message(
        self,
        choice: Choice,
        content: list[api.AnswerBlock],
        stop_reason: api.StopName | None = None,
        stop_sequence: str | None = None,
    ) -> api.ModelMessage:
        return api.ModelMessage(
            id=self._id,
            model=self.request.model,
            content=content,
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=_usage(choice),
        )


_DELTAS = {
    "text": (b"text_delta", b"text"),
    "reasoning": (b"thinking_delta", b"thinking"),
    "call": (b"input_json_delta", b"partial_json"),
}


def _end(choice: Choice) -> tuple[api.StopName, str | None]:
    """The reason of the end, and the stop string that was found."""
    if choice.finish is not FinishReason.STOP:
        return "max_tokens", None
    if choice.latest.stop_string:
        return "stop_sequence", choice.latest.stop_string
    return ("tool_use" if choice.has_calls else "end_turn"), None


def _content(block: Block, text: str) -> api.AnswerBlock:
    """The block of an answer with this text."""
    if block.kind == "text":
        return api.TextBlock(text=text)
    if block.kind == "reasoning":
        return api.ThinkingBlock(thinking=text)
    return api.ToolUseBlock(id=block.call_id, name=block.name, input=_input(text))


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object; {} for arguments that were cut or are no object."""
    try:
        found = msgspec.json.decode(arguments or "{}")
    except (msgspec.MsgspecError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _usage(choice: Choice) -> api.MessagesUsage:
    latest = choice.latest
    return api.MessagesUsage(
        input_tokens=latest.prompt_tokens - latest.cached_tokens,
        cache_read_input_tokens=latest.cached_tokens,
        output_tokens=latest.completion_tokens,
    )
