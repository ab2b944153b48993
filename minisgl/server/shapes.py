"""The JSON of answers: whole objects, and stream chunks with all fixed parts encoded once."""

import time
import uuid
from typing import Any

import msgspec

import minisgl
from minisgl.core import FinishReason
from minisgl.server.client import Choice, Generation
from minisgl.server.params import CHAT
from minisgl.server.requests import GenerateRequest

__all__ = ["DONE", "Shape", "sse"]

DONE = b"data: [DONE]\n\n"
_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


def sse(payload: bytes) -> bytes:
    """One server-sent event; JSON has no raw newlines, so one data line is enough."""
    return b"data: " + payload + b"\n\n"


class Shape:
    """Writes the answer to one request; id, created and model are the same on every chunk."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._is_chat = request.route == CHAT
        kind = "chat.completion" if self._is_chat else "text_completion"
        self._head: dict[str, Any] = {
            "id": ("chatcmpl-" if self._is_chat else "cmpl-") + uuid.uuid4().hex,
            "object": kind,
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": f"minisgl-{minisgl.__version__}",
        }
        chunk_head = dict(self._head)
        if self._is_chat:
            chunk_head["object"] = "chat.completion.chunk"
        head = msgspec.json.encode(chunk_head)[:-1]
        self._before = b"data: " + head + b',"choices":[{"index":'
        # With include_usage each chunk has a usage field, null except in the last one.
        self._after = b',"usage":null}\n\n' if request.include_usage else b"}\n\n"
        self._usage_before = b"data: " + head + b',"choices":[],"usage":'

    def whole(self, generation: Generation, texts: list[str]) -> bytes:
        """The answer of a call without stream."""
        choices = [
            self._whole_choice(choice, text)
            for choice, text in zip(generation.choices, texts, strict=True)
        ]
        return msgspec.json.encode(
            {**self._head, "choices": choices, "usage": self._usage(generation)}
        )

    def _whole_choice(self, choice: Choice, text: str) -> dict[str, Any]:
        body: dict[str, Any] = {"index": choice.index}
        if self._is_chat:
            body["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            body["text"] = text
        body["logprobs"] = None
        body["finish_reason"] = _finish_name(choice)
        return body

    def first_chunk(self, index: int, echo: str) -> bytes:
        """What comes before any generated text: the role of a chat, the echo of a completion."""
        if self._is_chat:
            delta = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":'
            return b"%s%d%snull}]%s" % (self._before, index, delta, self._after)
        return self.text_chunk(index, echo) if echo else b""

    def text_chunk(self, index: int, text: str) -> bytes:
        """New text of one choice."""
        field = b',"delta":{"content":%s}' if self._is_chat else b',"text":%s'
        body = field % msgspec.json.encode(text)
        return b'%s%d%s,"logprobs":null,"finish_reason":null}]%s' % (
            self._before,
            index,
            body,
            self._after,
        )

    def last_chunk(self, choice: Choice) -> bytes:
        """The finish reason of one choice."""
        body = b',"delta":{}' if self._is_chat else b',"text":""'
        return b'%s%d%s,"logprobs":null,"finish_reason":"%s"}]%s' % (
            self._before,
            choice.index,
            body,
            _finish_name(choice).encode(),
            self._after,
        )

    def usage_chunk(self, generation: Generation) -> bytes:
        """Sent last, when include_usage asks for it."""
        return self._usage_before + msgspec.json.encode(self._usage(generation)) + b"}\n\n"

    def _usage(self, generation: Generation) -> dict[str, Any]:
        """Each prompt counts once, however many choices it has."""
        firsts = generation.choices[:: self._request.n]
        prompt_tokens = sum(choice.prompt_tokens for choice in firsts)
        completion_tokens = sum(choice.completion_tokens for choice in generation.choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(c.cached_tokens for c in firsts)},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }


def _finish_name(choice: Choice) -> str:
    assert choice.finish in _FINISH, f"an answer ended by {choice.finish}; this is a bug"
    return _FINISH[choice.finish]
