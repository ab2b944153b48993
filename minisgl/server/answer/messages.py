"""Writes answers in the form of Anthropic's Messages API."""

from typing import Any

import msgspec

from minisgl.core import FinishReason
from minisgl.protocol import messages_api as api
from minisgl.request.choice import Choice, Details
from minisgl.server.answer.blocks import Block, BlockWriter, sse
from minisgl.server.errors import messages_error


class MessagesWriter(BlockWriter):
    """Writes the answer to a request of the Messages API."""

    keep_alive = b'event: ping\ndata: {"type": "ping"}\n\n'

    id_prefix = "msg_"

    def answer(self, choice: Choice) -> api.ModelMessage:
        message = self._message(choice)
        message.content = [_content(block, block.text) for block in self.blocks]
        message.stop_reason, message.stop_sequence = _end(choice)
        return message

    def first_chunk(self, choice: Choice, details: Details | None) -> bytes:
        """The event before the first block."""
        return _event("message_start", message=self._message(choice))

    def begun(self, block: Block) -> bytes:
        delta, field = _DELTAS[block.kind]
        self._before = b'event: content_block_delta\ndata: {"type":"content_block_delta",'
        self._before += b'"index":%d,"delta":{"type":"%b","%b":' % (block.index, delta, field)
        content = _content(block, "")
        return _event("content_block_start", index=block.index, content_block=content)

    def added(self, block: Block, text: str) -> bytes:
        return b"%b%b}}\n\n" % (self._before, msgspec.json.encode(text))

    def closed(self, block: Block) -> bytes:
        return _event("content_block_stop", index=block.index)

    def ended(self, choice: Choice) -> bytes:
        reason, text = _end(choice)
        delta = api.MessagesDelta(stop_reason=reason, stop_sequence=text)
        end = _event("message_delta", delta=delta, usage=_usage(choice))
        return end + _event("message_stop")

    def error_chunk(self, error: BaseException) -> bytes:
        """The event that ends a stream after a failure."""
        return sse("error", messages_error(error))

    def _message(self, choice: Choice) -> api.ModelMessage:
        return api.ModelMessage(
            id=self.id, model=self.request.model, content=[], usage=_usage(choice)
        )


def _event(kind: str, **fields: Any) -> bytes:
    return sse(kind, api.MessagesEvent(type=kind, **fields))


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
    cached, prompt = latest.cached_tokens, latest.prompt_tokens
    created, of_hour = [max(min(place, prompt) - cached, 0) for place in choice.breakpoints]
    return api.MessagesUsage(
        input_tokens=prompt - cached - created,
        cache_creation_input_tokens=created,
        cache_creation=api.CacheCreation(
            ephemeral_5m_input_tokens=created - of_hour, ephemeral_1h_input_tokens=of_hour
        ),
        cache_read_input_tokens=cached,
        output_tokens=latest.completion_tokens,
    )
