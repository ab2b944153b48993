"""Writes answers in the form of OpenAI's Responses API."""

import time
import uuid
from typing import Any

import msgspec

from minisgl.core import FinishReason
from minisgl.server.apis.blocks import Block, BlockWriter, sse
from minisgl.server.convert import GenerateRequest
from minisgl.server.errors import public_message
from minisgl.server.generation import Choice, Generation
from minisgl.server.protocol import responses_api as api


class ResponsesWriter(BlockWriter):
    """Writes the answer to a request of the Responses API."""

    keep_alive = b": keep-alive\n\n"  # a comment that clients skip

    def __init__(self, request: GenerateRequest) -> None:
        super().__init__(request)
        self._head: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "created_at": int(time.time()),
            "model": request.model,
            **request.repeated,
        }
        self._sequence = 0
        self._before = b""  # the bytes of an event with new text, up to its text

    def answer(self, choice: Choice) -> api.ModelResponse:
        is_complete = choice.finish is FinishReason.STOP
        return self._response(
            "completed" if is_complete else "incomplete",
            completed_at=int(time.time()),
            incomplete_details=None if is_complete else api.IncompleteDetails("max_output_tokens"),
            usage=_usage(choice),
        )

    def first_chunk(self, choice: Choice, generation: Generation) -> bytes:
        response = self._response("in_progress")
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def begun(self, block: Block) -> bytes:
        added = self._event(
            "response.output_item.added",
            output_index=block.index,
            item=_item(block, "in_progress", is_begun=False),
        )
        kind = "function_call_arguments"
        place: dict[str, Any] = {"item_id": _item_id(block), "output_index": block.index}
        if block.kind != "call":
            place["content_index"] = 0
            added += self._event("response.content_part.added", part=_part(block), **place)
            kind = "output_text" if block.kind == "text" else "reasoning_text"
        kind = f"response.{kind}.delta"
        if block.kind == "text":
            place["logprobs"] = ()
        fields = msgspec.json.encode({"type": kind, **place})
        self._before = b"event: %b\ndata: %b" % (kind.encode(), fields[:-1])
        return added

    def added(self, block: Block, text: str) -> bytes:
        self._sequence += 1
        before, number, delta = self._before, self._sequence - 1, msgspec.json.encode(text)
        return b'%b,"sequence_number":%d,"delta":%b}\n\n' % (before, number, delta)

    def closed(self, block: Block) -> bytes:
        place: dict[str, Any] = {"item_id": _item_id(block), "output_index": block.index}
        if block.kind == "call":
            kind = "response.function_call_arguments.done"
            done = self._event(kind, name=block.name, arguments=block.text, **place)
        else:
            place["content_index"] = 0
            part = _part(block)
            if block.kind == "text":
                kind = "response.output_text.done"
                done = self._event(kind, text=part.text, logprobs=(), **place)
            else:
                done = self._event("response.reasoning_text.done", text=part.text, **place)
            done += self._event("response.content_part.done", part=part, **place)
        item = _item(block, "completed" if block.is_complete else "incomplete")
        return done + self._event("response.output_item.done", output_index=block.index, item=item)

    def ended(self, choice: Choice) -> bytes:
        response = self.answer(choice)
        return self._event(f"response.{response.status}", response=response)

    def error_chunk(self, error: BaseException) -> bytes:
        failure = api.ResponseFailure("server_error", public_message(error))
        return self._event("response.failed", response=self._response("failed", error=failure))

    def _response(self, status: api.Status, **fields: Any) -> api.ModelResponse:
        output = [
            _item(block, "completed" if block.is_complete else "incomplete")
            for block in self.blocks
        ]
        return api.ModelResponse(**self._head, **fields, status=status, output=output)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        event = api.ResponsesEvent(type=kind, sequence_number=self._sequence - 1, **fields)
        return sse(kind, event)


def _item_id(block: Block) -> str:
    return {"reasoning": "rs_", "text": "msg_", "call": "fc_"}[block.kind] + block.id


def _item(block: Block, status: api.ItemStatus, is_begun: bool = True) -> api.OutputItem:
    """The item of a block. is_begun: False for the event that announces it without its content."""
    ids: dict[str, Any] = {"id": _item_id(block), "status": status}
    if block.kind == "call":
        return api.FunctionCallItem(
            **ids, call_id=block.call_id, name=block.name, arguments=block.text
        )
    part = _part(block)
    if isinstance(part, api.OutputText):
        return api.OutputMessage(**ids, content=[part] if is_begun else [])
    return api.ReasoningItem(**ids, content=[part] if is_begun else [])


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
