"""The JSON of answers: whole objects, and stream chunks with all fixed parts encoded once."""

import time
import uuid
from dataclasses import replace
from typing import Any

import msgspec

import minisgl
from minisgl.core import FinishReason
from minisgl.message import TokenLogprob
from minisgl.server.generation import Choice, ChoiceDelta, Generation
from minisgl.server.params import CHAT, COMPLETIONS, GENERATE
from minisgl.server.requests import GenerateRequest

DONE = b"data: [DONE]\n\n"
_LOWEST_LOGPROB = -9999.0
_KINDS = {
    CHAT: ("chatcmpl-", "chat.completion"),
    COMPLETIONS: ("cmpl-", "text_completion"),
    GENERATE: ("gen-", "generation"),
}


def sse(payload: bytes) -> bytes:
    """One server-sent event; JSON has no raw newlines, so one data line is enough."""
    return b"data: " + payload + b"\n\n"


class ResponseWriter:
    """Writes the answer to one request; id, created and model are the same on every chunk."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self._is_chat = request.route == CHAT
        prefix, kind = _KINDS[request.route]
        self._head: dict[str, Any] = {
            "id": prefix + uuid.uuid4().hex,
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

    def whole(self, generation: Generation) -> bytes:
        """The answer of a call without stream, once all of it has come."""
        choices = [self._whole_choice(choice, generation) for choice in generation.choices]
        body = {**self._head, "choices": choices, "usage": self._usage(generation)}
        if self._is_chat and generation.prompt_ids:
            body["prompt_token_ids"] = generation.prompt_ids[0]
        return msgspec.json.encode(body)

    def _whole_choice(self, choice: Choice, generation: Generation) -> dict[str, Any]:
        text, extras = choice.take()
        text, extras = generation.echo(choice) + text, extras or ChoiceDelta()
        body: dict[str, Any] = {"index": choice.index}
        if self._is_chat:
            body["message"] = {"role": "assistant", "content": text, "refusal": None}
            if extras.reasoning:
                body["message"]["reasoning_content"] = extras.reasoning
        else:
            body["text"] = text
        body["logprobs"] = self._logprobs(extras)
        body["finish_reason"] = _finish_name(choice)
        self._add_ids(body, choice, extras, generation)
        return body

    def _chunk(self, index: int, fields: bytes, ids: bytes = b"") -> bytes:
        return b"%s%d,%s}]%s%s" % (self._before, index, fields, ids, self._after)

    def first_chunk(self, choice: Choice, generation: Generation) -> bytes:
        """What comes before any generated text: the role of a chat."""
        if not self._is_chat:
            return b""
        ids = b""
        if generation.prompt_ids:
            ids = b',"prompt_token_ids":' + msgspec.json.encode(generation.prompt_ids[0])
        fields = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return self._chunk(choice.index, fields, ids)

    def text_chunk(self, index: int, text: str) -> bytes:
        """New text of one choice."""
        field = b'"delta":{"content":%s}' if self._is_chat else b'"text":%s'
        rest = b',"logprobs":null,"finish_reason":null'
        return self._chunk(index, field % msgspec.json.encode(text) + rest)

    def rich_chunk(
        self, choice: Choice, text: str, extras: ChoiceDelta, generation: Generation | None
    ) -> bytes:
        """New text with what comes beside it. generation: given with the choice's first chunk."""
        if self._is_chat and extras.reasoning and text:
            # In two: a client that finds one of them in a delta may not look for the other.
            thought, rest = ChoiceDelta(reasoning=extras.reasoning), replace(extras, reasoning="")
            before = self.rich_chunk(choice, "", thought, None)
            return before + self.rich_chunk(choice, text, rest, generation)
        body: dict[str, Any] = {"text": text}
        if self._is_chat:
            reasoning = extras.reasoning
            body = {"delta": {"reasoning_content": reasoning} if reasoning else {"content": text}}
        body["logprobs"] = self._logprobs(extras)
        body["finish_reason"] = None
        self._add_ids(body, choice, extras, generation)
        return self._chunk(choice.index, msgspec.json.encode(body)[1:-1])

    def _add_ids(
        self,
        body: dict[str, Any],
        choice: Choice,
        extras: ChoiceDelta,
        generation: Generation | None,
    ) -> None:
        if not self.request.text.token_ids:
            return
        body["token_ids"] = extras.token_ids
        if generation is not None and not self._is_chat:
            body["prompt_token_ids"] = generation.prompt_ids[choice.index // self.request.n]

    def _logprobs(self, extras: ChoiceDelta) -> dict[str, Any] | None:
        if self.request.sampling.logprobs is None:
            return None
        if self._is_chat:
            kept = [entry for entry in extras.logprobs if not entry.ends]  # as OpenAI has it
            return {"content": [_chat_logprob(entry) for entry in kept], "refusal": None}
        return _completion_logprobs([*extras.prompt_logprobs, *extras.logprobs])

    def last_chunk(self, choice: Choice) -> bytes:
        """The finish reason of one choice."""
        field = b'"delta":{}' if self._is_chat else b'"text":""'
        rest = b',"logprobs":null,"finish_reason":"%s"' % _finish_name(choice).encode()
        return self._chunk(choice.index, field + rest)

    def usage_chunk(self, generation: Generation) -> bytes:
        """Sent last, when include_usage asks for it."""
        return self._usage_before + msgspec.json.encode(self._usage(generation)) + b"}\n\n"

    def _usage(self, generation: Generation) -> dict[str, Any]:
        """Each prompt counts once, however many choices it has."""
        firsts = generation.choices[:: self.request.n]
        prompt_tokens = sum(choice.latest.prompt_tokens for choice in firsts)
        completion_tokens = sum(choice.latest.completion_tokens for choice in generation.choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(c.latest.cached_tokens for c in firsts)},
            "completion_tokens_details": {
                "reasoning_tokens": sum(c.latest.reasoning_tokens for c in generation.choices)
            },
        }


def _finish_name(choice: Choice) -> str:
    good = (FinishReason.STOP, FinishReason.LENGTH)
    assert choice.finish in good, f"an answer ended by {choice.finish}; this is a bug"
    return choice.finish.value


def _number(logprob: float) -> float:
    """JSON has no infinity and no NaN; -9999 is what others write."""
    return logprob if logprob > _LOWEST_LOGPROB else _LOWEST_LOGPROB


def _chat_token(data: bytes, logprob: float) -> dict[str, Any]:
    """bytes: exactly the token's; many tokens are not whole characters."""
    text = data.decode("utf-8", "replace")
    return {"token": text, "logprob": _number(logprob), "bytes": list(data)}


def _chat_logprob(entry: TokenLogprob) -> dict[str, Any]:
    assert entry.logprob is not None, "a generated token has a log-probability: this is a bug"
    top = [_chat_token(data, logprob) for data, logprob in entry.top]
    return {**_chat_token(entry.token_bytes, entry.logprob), "top_logprobs": top}


def _completion_token(data: bytes) -> str:
    """As OpenAI writes it: what is no whole character, byte by byte."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _completion_logprobs(entries: list[TokenLogprob]) -> dict[str, Any]:
    """Four parallel lists. The token itself is among the most likely ones, or beside them."""
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        if entry.logprob is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for data, logprob in [*entry.top, (entry.token_bytes, entry.logprob)]:
            top.setdefault(_completion_token(data), _number(logprob))
        tops.append(top)
    return {
        "tokens": [_completion_token(entry.token_bytes) for entry in entries],
        "token_logprobs": [None if e.logprob is None else _number(e.logprob) for e in entries],
        "top_logprobs": tops,
        "text_offset": [entry.offset for entry in entries],
    }
