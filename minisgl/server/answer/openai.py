"""Writes answers in OpenAI's format, as JSON and as server-sent events.

Whole answers are encoded from the structs of `protocol`. The parts that all events of a stream have
in common are encoded once, because a busy server sends tens of thousands of events per second.

A thread encodes large answers, and the event loop serves other calls meanwhile. Python switches
between the two every 5 ms, but not within one call of the JSON encoder. The log-probabilities of
each token are therefore encoded by a call of their own.
"""

import asyncio
import time
import uuid
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

import minisgl
from minisgl.core import FinishReason
from minisgl.message.messages import TokenLogprob, ToolCallDelta
from minisgl.protocol import responses
from minisgl.protocol.requests import CHAT, COMPLETIONS, GENERATE
from minisgl.request.call import Call
from minisgl.request.choice import Choice, Details, whole_calls
from minisgl.request.convert import CallRequest
from minisgl.server.errors import error_reply

DONE = b"data: [DONE]\n\n"
_LOWEST_LOGPROB = -9999.0
_KINDS = {
    CHAT: ("chatcmpl-", "chat.completion"),
    COMPLETIONS: ("cmpl-", "text_completion"),
    GENERATE: ("gen-", "generation"),
}


class ResponseWriter:
    """Writes the answer to one request in OpenAI's format, as a whole or as events.

    writer = ResponseWriter(request)
    body = await writer.whole(call)                     without stream, after the last token
    event = writer.text_chunk(choice.index, " word")    with stream
    """

    keep_alive = b": keep-alive\n\n"  # a comment that clients skip

    def __init__(self, request: CallRequest) -> None:
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
        chunk_kind = "chat.completion.chunk" if self._is_chat else kind
        head = msgspec.json.encode({**self._head, "object": chunk_kind})[:-1]
        self._before = b"data: " + head + b',"choices":['
        # With include_usage each event has a usage field, which is null until the last event.
        self._after = b',"usage":null}\n\n' if request.include_usage else b"}\n\n"
        rest = b',"logprobs":null,"finish_reason":null}]' + self._after
        # The bytes between the values of a text chunk: index and text.
        start = self._before + b'{"index":'
        chat = start, b',"delta":{"content":', b"}" + rest
        self._around_text = chat if self._is_chat else (start, b',"text":', rest)

    async def whole(self, call: Call) -> bytes:
        """The JSON body of an answer without stream. The call has ended."""
        if self.request.sampling.logprobs is None and not self.request.text.token_ids:
            return self._whole(call)
        return await asyncio.to_thread(self._whole, call)

    def _whole(self, call: Call) -> bytes:
        first = call.choices[0].details
        choices = [self._whole_choice(call, choice) for choice in call.choices]
        body = {**self._head, "choices": choices, "usage": self._usage(call)}
        if not self._is_chat:
            return msgspec.json.encode(responses.TextCompletion(**body))
        if first is not None and first.prompt_ids:
            body["prompt_token_ids"] = _encoded([*first.prompt_ids])
        return msgspec.json.encode(responses.ChatCompletion(**body))

    def _whole_choice(
        self, call: Call, choice: Choice
    ) -> responses.ChatChoice | responses.TextChoice:
        text, details = call.take(choice.index)
        details = details or Details()
        values = self._values(choice, details)
        values["finish_reason"] = self._finish_name(choice)
        if not self._is_chat:
            return responses.TextChoice(text=text, **values)
        message = responses.AnswerMessage(
            content=text or (None if choice.has_calls else ""),
            reasoning_content="".join(details.reasoning) or UNSET,
            tool_calls=[_call(part, UNSET) for part in whole_calls(details.calls)] or UNSET,
        )
        return responses.ChatChoice(message=message, **values)

    def first_chunk(self, choice: Choice, details: Details | None) -> bytes:
        """The event before any generated text: the role of a chat, nothing for a completion.

        details: of the first output, with the ids of the prompt.
        """
        if not self._is_chat:
            return b""
        ids = b""
        if details is not None and self._has_prompt_ids(choice, details):
            ids = b',"prompt_token_ids":' + msgspec.json.encode([*details.prompt_ids])
        content = None if self.request.text.tools else ""
        role = responses.Delta(role="assistant", content=content)
        return self._chunk(responses.ChatChunkChoice(index=choice.index, delta=role), ids)

    def text_chunk(self, index: int, text: str) -> bytes:
        """The event with new text of one choice and nothing else. It is the most frequent event."""
        start, field, end = self._around_text
        return b"%b%d%b%b%b" % (start, index, field, msgspec.json.encode(text), end)

    def details_chunk(self, choice: Choice, text: str, details: Details) -> bytes:
        """New text with reasoning, tool calls, token ids or log-probabilities."""
        values = self._values(choice, details)
        if not self._is_chat:
            return self._chunk(responses.TextChunkChoice(text=text, **values))
        # Reasoning, content and each part of a call are separate events: a client may ignore the
        # content of a delta with reasoning, and expects one part of one call in a delta. The last
        # event has the token ids and the log-probabilities.
        deltas = [responses.Delta(tool_calls=[_call(part, part.index)]) for part in details.calls]
        if text:
            deltas.insert(0, responses.Delta(content=text))
        if details.reasoning:
            reasoning = "".join(details.reasoning)
            deltas.insert(0, responses.Delta(reasoning_content=reasoning))
        *before, last = deltas or [responses.Delta(content="")]
        parts = [responses.ChatChunkChoice(index=choice.index, delta=each) for each in before]
        parts.append(responses.ChatChunkChoice(delta=last, **values))
        return b"".join([self._chunk(part) for part in parts])

    def last_chunk(self, choice: Choice) -> bytes:
        """The finish reason of one choice."""
        values: dict[str, Any] = {"index": choice.index, "finish_reason": self._finish_name(choice)}
        if self._is_chat:
            return self._chunk(responses.ChatChunkChoice(delta=responses.Delta(), **values))
        return self._chunk(responses.TextChunkChoice(text="", **values))

    def _finish_name(self, choice: Choice) -> responses.FinishName:
        if choice.finish is FinishReason.LENGTH:
            return "length"
        assert choice.finish is FinishReason.STOP, "a whole answer must have ended; this is a bug"
        return "tool_calls" if choice.has_calls and not self.request.named_tool else "stop"

    def end_chunk(self, call: Call) -> bytes:
        """The usage, with include_usage, and the mark of the end of a stream."""
        if not self.request.include_usage:
            return DONE
        usage = msgspec.json.encode(self._usage(call))
        return self._before + b'],"usage":' + usage + b"}\n\n" + DONE

    def error_chunk(self, error: BaseException) -> bytes:
        """The events that end a stream after a failure."""
        return b"data: " + error_reply(error).body + b"\n\n" + DONE

    def _chunk(self, choice: msgspec.Struct, ids: bytes = b"") -> bytes:
        """One event of one choice. ids: the field prompt_token_ids of a chat, or b""."""
        return b"%b%b]%b%b" % (self._before, msgspec.json.encode(choice), ids, self._after)

    def _values(self, choice: Choice, details: Details) -> dict[str, Any]:
        """The fields of a choice's struct, without its text."""
        values: dict[str, Any] = {
            "index": choice.index,
            "logprobs": self._logprobs(choice, details),
        }
        if self.request.text.token_ids:
            values["token_ids"] = details.token_ids
            if not self._is_chat and self._has_prompt_ids(choice, details):
                values["prompt_token_ids"] = _encoded([*details.prompt_ids])
        return values

    def _has_prompt_ids(self, choice: Choice, details: Details) -> bool:
        """True for the first choice of a prompt: an answer has the ids of each prompt once."""
        return bool(details.prompt_ids) and choice.index % self.request.n == 0

    def _logprobs(
        self, choice: Choice, details: Details
    ) -> responses.ChatLogprobs | responses.TextLogprobs | None:
        if self.request.sampling.logprobs is None:
            return None
        if not self._is_chat:
            return _text_logprobs([*details.prompt_logprobs, *details.logprobs], choice.offset)
        # As in OpenAI's answers, the token that ended the text has no entry.
        kept = [_encoded(chat_logprob(e)) for e in details.logprobs if not e.ends]
        return responses.ChatLogprobs(kept)

    def _usage(self, call: Call) -> responses.Usage:
        """Each prompt counts once, however many choices it has."""
        latest = [choice.latest for choice in call.choices]
        firsts = latest[:: self.request.n]  # of the first choice of each prompt
        prompt_tokens = sum(update.prompt_tokens for update in firsts)
        completion_tokens = sum(update.completion_tokens for update in latest)
        cached = sum(update.cached_tokens for update in firsts)
        reasoning = sum(update.reasoning_tokens for update in latest)
        accepted = sum(update.accepted_prediction_tokens for update in latest)
        predicted = sum(update.prediction_tokens for update in latest)
        return responses.Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=responses.PromptTokensDetails(cached),
            completion_tokens_details=responses.CompletionTokensDetails(
                reasoning, accepted, predicted - accepted
            ),
        )


def _call(part: ToolCallDelta, index: int | UnsetType) -> responses.AnswerCall:
    """The beginning of a call, or a piece of its arguments."""
    function = responses.AnswerFunction(part.arguments, part.name or UNSET)
    kind: Literal["function"] | UnsetType = "function" if part.id else UNSET
    return responses.AnswerCall(index=index, id=part.id or UNSET, type=kind, function=function)


def _finite(logprob: float) -> float:
    """JSON has no infinity and no NaN; other servers write -9999 instead."""
    return logprob if logprob > _LOWEST_LOGPROB else _LOWEST_LOGPROB


def _encoded(value: object) -> Any:
    """The value as JSON, for a field of a struct."""
    return msgspec.Raw(msgspec.json.encode(value))


def chat_logprob(entry: TokenLogprob) -> responses.ChatTokenLogprob:
    """A generated token of a chat with its log-probability."""
    assert entry.logprob is not None, "a generated token must have a log-probability; this is a bug"
    top = [_chat_token(data, logprob) for data, logprob in entry.top]
    token = _chat_token(entry.token_bytes, entry.logprob)
    return responses.ChatTokenLogprob(token.token, token.logprob, token.bytes, top)


def _chat_token(data: bytes, logprob: float) -> responses.TopLogprob:
    return responses.TopLogprob(data.decode("utf-8", "replace"), _finite(logprob), list(data))


def text_of_token(data: bytes) -> str:
    """Return a token as text, as in OpenAI's completions. Incomplete characters become numbers."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _text_logprobs(entries: list[TokenLogprob], offset: int) -> responses.TextLogprobs:
    """Return four parallel lists. `top_logprobs` always includes the token itself.

    offset: characters to add to the offset of each entry.
    """
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        if entry.logprob is None:  # the first token of a prompt
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for data, logprob in [*entry.top, (entry.token_bytes, entry.logprob)]:
            top.setdefault(text_of_token(data), _finite(logprob))
        tops.append(_encoded(top))
    return responses.TextLogprobs(
        tokens=[text_of_token(entry.token_bytes) for entry in entries],
        token_logprobs=[None if e.logprob is None else _finite(e.logprob) for e in entries],
        top_logprobs=tops,
        text_offset=[offset + entry.offset for entry in entries],
    )
