"""Writes answers in the form of OpenAI's Responses API."""

import time
from typing import Any

import msgspec

from minisgl.core import FinishReason
from minisgl.message.messages import TokenLogprob
from minisgl.protocol import responses_api as api
from minisgl.protocol.responses import ChatTokenLogprob
from minisgl.request.choice import Choice, Details
from minisgl.request.convert import CallRequest
from minisgl.request.from_responses import ENCRYPTED
from minisgl.request.sealed import seal
from minisgl.server.answer.blocks import Block, BlockWriter, sse
from minisgl.server.answer.openai import chat_logprob
from minisgl.server.errors import public_message


class ResponsesWriter(BlockWriter):
    """Writes the answer to a request of the Responses API."""

    keep_alive = b": keep-alive\n\n"  # a comment that clients skip
    id_prefix = "resp_"

    def __init__(self, request: CallRequest) -> None:
        super().__init__(request)
        self._head = {"id": self.id, "created_at": int(time.time()), **request.repeated}
        self._sequence = 0
        self._is_encrypted = ENCRYPTED in request.include
        self._pending: list[TokenLogprob] = []  # of tokens whose text has not been written
        self._logprobs: dict[int, list[ChatTokenLogprob]] = {}  # by the index of the block
        reasoning: api.ResponsesReasoning = request.repeated["reasoning"]
        self._names = dict(_NAMES)
        if reasoning.summary is not None:
            self._names["reasoning"] = "reasoning_summary_text"

    def answer(self, choice: Choice) -> api.ModelResponse:
        is_complete = choice.finish is FinishReason.STOP
        return self._response(
            "completed" if is_complete else "incomplete",
            completed_at=int(time.time()),
            incomplete_details=None if is_complete else api.IncompleteDetails("max_output_tokens"),
            usage=_usage(choice),
        )

    def first_chunk(self, choice: Choice, details: Details | None) -> bytes:
        """The events before the first block."""
        response = self._response("in_progress")
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def details_chunk(self, choice: Choice, text: str, details: Details) -> bytes:
        """As in the base class, with the log-probabilities of the text."""
        if text or not (details.reasoning or details.calls):
            self._pending += [entry for entry in details.logprobs if not entry.ends]
        return super().details_chunk(choice, text, details)

    def begun(self, block: Block) -> bytes:
        item = self._item(block, "in_progress")
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        place = self._place(block)
        if block.kind != "call":
            added += self._event(f"{self._part_name(block)}.added", part=self._part(block), **place)
        kind = f"response.{self._names[block.kind]}.delta"
        further = {"logprobs": ()} if block.kind == "text" else {}
        fields = msgspec.json.encode({"type": kind, **place, **further})
        self._before = b"event: %b\ndata: %b" % (kind.encode(), fields[:-1])
        return added

    def added(self, block: Block, text: str) -> bytes:
        if block.kind == "text" and self.request.sampling.logprobs is not None:
            found = [chat_logprob(entry) for entry in self._take(text)]
            self._logprobs.setdefault(block.index, []).extend(found)
            kind, place = "response.output_text.delta", self._place(block)
            return self._event(kind, delta=text, logprobs=found, **place)
        self._sequence += 1
        before, number, delta = self._before, self._sequence - 1, msgspec.json.encode(text)
        return b'%b,"sequence_number":%d,"delta":%b}\n\n' % (before, number, delta)

    def closed(self, block: Block) -> bytes:
        place, kind = self._place(block), f"response.{self._names[block.kind]}.done"
        if block.kind == "call":
            done = self._event(kind, name=block.name, arguments=block.text, **place)
        else:
            part = self._part(block)
            further = {"logprobs": part.logprobs} if isinstance(part, api.OutputText) else {}
            done = self._event(kind, text=part.text, **further, **place)
            done += self._event(f"{self._part_name(block)}.done", part=part, **place)
        item = self._item(block)
        return done + self._event("response.output_item.done", output_index=block.index, item=item)

    def ended(self, choice: Choice) -> bytes:
        response = self.answer(choice)
        return self._event(f"response.{response.status}", response=response)

    def error_chunk(self, error: BaseException) -> bytes:
        """The event that ends a stream after a failure."""
        failure = api.ResponseFailure("server_error", public_message(error))
        return self._event("response.failed", response=self._response("failed", error=failure))

    def _response(self, status: api.Status, **fields: Any) -> api.ModelResponse:
        output = [self._item(block) for block in self.blocks]
        return api.ModelResponse(**self._head, **fields, status=status, output=output)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        event = api.ResponsesEvent(type=kind, sequence_number=self._sequence - 1, **fields)
        return sse(kind, event)

    def _take(self, text: str) -> list[TokenLogprob]:
        """Remove the tokens up to the end of this text, and return those that are part of it."""
        data = b"".join([entry.token_bytes for entry in self._pending])
        start = data.rfind(text.encode())
        if start < 0:  # bytes of the tokens have been replaced
            found, self._pending = self._pending, []
            return found
        end, place, found, rest = start + len(text.encode()), 0, [], []
        for entry in self._pending:
            if place >= end:
                rest.append(entry)
            elif place + len(entry.token_bytes) > start:
                found.append(entry)
            place += len(entry.token_bytes)
        self._pending = rest
        return found

    def _is_summary(self, block: Block) -> bool:
        return self._names[block.kind] == "reasoning_summary_text"

    def _part_name(self, block: Block) -> str:
        """The beginning of the names of the events about the part of a block."""
        is_summary = self._is_summary(block)
        return "response.reasoning_summary_part" if is_summary else "response.content_part"

    def _place(self, block: Block) -> dict[str, Any]:
        """The fields that name the part of the answer."""
        place = {"item_id": _PREFIXES[block.kind] + block.id, "output_index": block.index}
        if block.kind != "call":
            place["summary_index" if self._is_summary(block) else "content_index"] = 0
        return place

    def _item(self, block: Block, status: api.ItemStatus | None = None) -> api.OutputItem:
        """The item of a block. status: given for the event that announces it without content."""
        ended: api.ItemStatus = "completed" if block.is_complete else "incomplete"
        ids: dict[str, Any] = {"id": _PREFIXES[block.kind] + block.id, "status": status or ended}
        if block.kind == "call":
            return api.FunctionCallItem(
                **ids, call_id=block.call_id, name=block.name, arguments=block.text
            )
        content: list[Any] = [] if status == "in_progress" else [self._part(block)]
        if block.kind == "text":
            return api.OutputMessage(**ids, content=content)
        if self._is_encrypted:
            ids["encrypted_content"] = seal(block.text)
        if self._is_summary(block):
            return api.ReasoningItem(**ids, summary=content, content=[])
        return api.ReasoningItem(**ids, content=content)

    def _part(self, block: Block) -> api.OutputText | api.ReasoningText | api.SummaryText:
        if block.kind == "text":
            return api.OutputText(text=block.text, logprobs=self._logprobs.get(block.index, []))
        kind = api.SummaryText if self._is_summary(block) else api.ReasoningText
        return kind(text=block.text)


_PREFIXES = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}
# The names of the events with text.
_NAMES = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}


def _usage(choice: Choice) -> api.ResponsesUsage:
    latest = choice.latest
    return api.ResponsesUsage(
        input_tokens=latest.prompt_tokens,
        input_tokens_details=api.InputDetails(latest.cached_tokens),
        output_tokens=latest.completion_tokens,
        output_tokens_details=api.OutputDetails(latest.reasoning_tokens),
        total_tokens=latest.prompt_tokens + latest.completion_tokens,
    )
