"""Writes answers in the form of OpenAI's Responses API."""

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from minisgl.core import FinishReason
from minisgl.protocol import responses_api as api
from minisgl.server.apis.blocks import Block, BlockWriter, sse
from minisgl.server.convert import GenerateRequest
from minisgl.server.errors import public_message
from minisgl.server.generation import Choice, ChoiceDelta


class ResponsesWriter(BlockWriter):
    """Writes the answer to a request of the Responses API."""

    keep_alive = b": keep-alive\n\n"  # a comment that clients skip
    id_prefix = "resp_"

    def __init__(self, request: GenerateRequest) -> None:
        super().__init__(request)
        self._head = {"id": self.id, "created_at": int(time.time()), **request.repeated}
        self._sequence = 0

    def answer(self, choice: Choice) -> api.ModelResponse:
        is_complete = choice.finish is FinishReason.STOP
        return self._response(
            "completed" if is_complete else "incomplete",
            completed_at=int(time.time()),
            incomplete_details=None if is_complete else api.IncompleteDetails("max_output_tokens"),
            usage=_usage(choice),
        )

    def first_chunk(self, choice: Choice, delta: ChoiceDelta | None) -> bytes:
        """The events before the first block."""
        response = self._response("in_progress")
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def begun(self, block: Block) -> bytes:
        item = _item(block, "in_progress")
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        place = _place(block)
        if block.kind != "call":
            added += self._event("response.content_part.added", part=_part(block), **place)
        kind = f"response.{_NAMES[block.kind]}.delta"
        fields = msgspec.json.encode({"type": kind, **place, **_LOGPROBS[block.kind]})
        self._before = b"event: %b\ndata: %b" % (kind.encode(), fields[:-1])
        return added

    def added(self, block: Block, text: str) -> bytes:
        self._sequence += 1
        before, number, delta = self._before, self._sequence - 1, msgspec.json.encode(text)
        return b'%b,"sequence_number":%d,"delta":%b}\n\n' % (before, number, delta)

    def closed(self, block: Block) -> bytes:
        place, kind = _place(block), f"response.{_NAMES[block.kind]}.done"
        if block.kind == "call":
            done = self._event(kind, name=block.name, arguments=block.text, **place)
        else:
            part = _part(block)
            done = self._event(kind, text=part.text, **_LOGPROBS[block.kind], **place)
            done += self._event("response.content_part.done", part=part, **place)
        item = _item(block)
        return done + self._event("response.output_item.done", output_index=block.index, item=item)

    def ended(self, choice: Choice) -> bytes:
        response = self.answer(choice)
        return self._event(f"response.{response.status}", response=response)

    def error_chunk(self, error: BaseException) -> bytes:
        """The event that ends a stream after a failure."""
        failure = api.ResponseFailure("server_error", public_message(error))
        return self._event("response.failed", response=self._response("failed", error=failure))

    def _response(self, status: api.Status, **fields: Any) -> api.ModelResponse:
        output = [_item(block) for block in self.blocks]
        return api.ModelResponse(**self._head, **fields, status=status, output=output)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        event = api.ResponsesEvent(type=kind, sequence_number=self._sequence - 1, **fields)
        return sse(kind, event)


_PREFIXES = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}
_NAMES = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
# A further field of the events of a text.
_LOGPROBS: Mapping[str, dict[str, Any]] = {"reasoning": {}, "text": {"logprobs": ()}, "call": {}}


def _place(block: Block) -> dict[str, Any]:
    """The fields that name the part of the answer."""
    place = {"item_id": _PREFIXES[block.kind] + block.id, "output_index": block.index}
    return place if block.kind == "call" else {**place, "content_index": 0}


def _item(block: Block, status: api.ItemStatus | None = None) -> api.OutputItem:
    """The item of a block. status: given for the event that announces it without content."""
    ended: api.ItemStatus = "completed" if block.is_complete else "incomplete"
    ids: dict[str, Any] = {"id": _PREFIXES[block.kind] + block.id, "status": status or ended}
    if block.kind == "call":
        return api.FunctionCallItem(
            **ids, call_id=block.call_id, name=block.name, arguments=block.text
        )
    content: list[Any] = [] if status == "in_progress" else [_part(block)]
    if block.kind == "text":
        return api.OutputMessage(**ids, content=content)
    return api.ReasoningItem(**ids, content=content)


def _part(block: Block) -> api.OutputText | api.ReasoningText:
    is_text = block.kind == "text"
    return (api.OutputText if is_text else api.ReasoningText)(text=block.text)


def _usage(choice: Choice) -> api.ResponsesUsage:
    latest = choice.latest
    return api.ResponsesUsage(
        input_tokens=latest.prompt_tokens,
        input_tokens_details=api.InputDetails(latest.cached_tokens),
        output_tokens=latest.completion_tokens,
        output_tokens_details=api.OutputDetails(latest.reasoning_tokens),
        total_tokens=latest.prompt_tokens + latest.completion_tokens,
    )
