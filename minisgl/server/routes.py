"""The routes of calls: generation and tokens."""

import array
import asyncio
from collections.abc import Callable, Mapping

import msgspec
from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

from minisgl.core import InvalidRequest
from minisgl.message.messages import DecodeIds, TokenizeResult
from minisgl.protocol import responses
from minisgl.protocol.messages_api import TokenCount
from minisgl.protocol.requests import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    GENERATE,
    INPUT_TOKENS,
    MESSAGES,
    RESPONSES,
)
from minisgl.protocol.responses_api import InputTokens
from minisgl.request.convert import CallRequest
from minisgl.request.fit import fit_prompts
from minisgl.request.question import Question
from minisgl.request.sessions import session_key
from minisgl.server.answer.disconnect import unless_disconnected
from minisgl.server.answer.messages import MessagesWriter
from minisgl.server.answer.openai import ResponseWriter, text_of_token
from minisgl.server.answer.responses import ResponsesWriter
from minisgl.server.answer.stream import EventStream, Writer
from minisgl.server.context import CallContext, ContextDep
from minisgl.server.edge.middleware import json_response

router = APIRouter(redirect_slashes=False)

_MAX_TOKEN_STRS = 2**17  # A thread makes their texts in 150 ms.


@router.post("/v1/chat/completions", tags=["generation"])
async def chat_completions(context: ContextDep) -> Response:
    """Answer a chat, whole or as a stream of server-sent events."""
    return await _generate(CHAT, context)


@router.post("/v1/completions", tags=["generation"])
async def completions(context: ContextDep) -> Response:
    """Complete one prompt or a list of prompts; a prompt is text or a list of token ids."""
    return await _generate(COMPLETIONS, context)


@router.post("/generate", tags=["generation"])
async def generate(context: ContextDep) -> Response:
    """Complete a list of token ids; the answer holds the ids of the new tokens too."""
    return await _generate(GENERATE, context)


@router.post("/v1/responses", tags=["generation"])
async def create_response(context: ContextDep) -> Response:
    """Answer a list of items in the format of OpenAI's Responses API. Nothing is stored."""
    return await _generate(RESPONSES, context)


@router.post("/v1/messages", tags=["generation"])
async def create_message(context: ContextDep) -> Response:
    """Answer a chat in the format of Anthropic's Messages API."""
    return await _generate(MESSAGES, context)


@router.post("/v1/sessions/{session_id:path}/end", tags=["generation"])
async def end_session(context: ContextDep, session_id: str) -> Response:
    """Let evictions begin with the pages that only this session has used.

    session_id: the name that the requests sent with the same API key. It may contain slashes.
    """
    if not session_id:
        raise HTTPException(404)
    context.require_engine()
    context.service.lifecycle.require_accepting()
    context.engine.end_session(session_key(context.client_name, session_id))
    return json_response(responses.StatusResponse("ok"))


@router.post("/v1/messages/count_tokens", tags=["tokens"])
async def count_tokens(context: ContextDep) -> Response:
    """The number of prompt tokens of a chat in the format of Anthropic's Messages API."""
    return json_response(TokenCount(await _prompt_tokens(COUNT_TOKENS, context)))


@router.post("/v1/responses/input_tokens", tags=["tokens"])
async def input_tokens(context: ContextDep) -> Response:
    """The number of prompt tokens of a request in the format of OpenAI's Responses API."""
    return json_response(InputTokens(input_tokens=await _prompt_tokens(INPUT_TOKENS, context)))


async def _prompt_tokens(route: str, context: CallContext) -> int:
    """The number of tokens of the prompt of this body."""
    raw, facts = await context.read()
    (found,) = await _ask(context, context.converter.read_prompt(route, raw, facts))
    return len(found.token_ids) // 4


# The writer of each API other than OpenAI's chat and completions.
_WRITERS: Mapping[str, Callable[[CallRequest], Writer]] = {
    RESPONSES: ResponsesWriter,
    MESSAGES: MessagesWriter,
}


async def _generate(route: str, context: CallContext) -> Response:
    """Start the request of the body, and respond with the whole answer or with a stream."""
    context.require_engine()
    raw, facts = await context.read()
    request = context.converter.read(route, raw, facts)
    del raw  # Otherwise the body stays in memory until the response is complete.
    writer = _WRITERS.get(route, ResponseWriter)(request)
    engine = context.engine
    caller = context.caller(context.allowed_priority(request.priority), request.session)
    for feature in request.ignored:
        engine.metrics.count("ignored_features_total", 1, feature)
    if context.service.config.cache_isolation == "key":
        # No name has a newline, so the salts of two names always differ.
        salt = f"{context.client_name}\n{request.cache_salt}"
        request = msgspec.structs.replace(request, cache_salt=salt)
    call = engine.open(caller, request, request.num_choices)
    await unless_disconnected(context.request.receive, engine.run(call, facts))
    if request.stream:
        return EventStream(engine, writer, call)
    try:
        await unless_disconnected(context.request.receive, asyncio.ensure_future(call.ended()))
        return Response(await writer.whole(call), media_type="application/json")
    finally:
        engine.close(call)


@router.post("/v1/chat/completions/render", tags=["tokens"])
async def render_chat_completion(context: ContextDep) -> Response:
    """The token ids of the prompt of a chat completion, in the format of vLLM."""
    (rendered,) = await _render(CHAT, context)
    return json_response(rendered)


@router.post("/v1/completions/render", tags=["tokens"])
async def render_completion(context: ContextDep) -> Response:
    """The token ids of each prompt of a completion, in the format of vLLM."""
    return json_response(await _render(COMPLETIONS, context))


async def _render(route: str, context: CallContext) -> list[responses.RenderedPrompt]:
    """Tokenize the prompts of a body of the route `route`. Raises the errors of that route."""
    raw, facts = await context.read()
    request = context.converter.read(route, raw, facts)
    answers = iter(await _ask(context, *request.prompt_questions()))
    limit = context.engine.limits.max_call_tokens
    prompts, _ = fit_prompts(request, answers, None, facts, limit)
    return [
        responses.RenderedPrompt(
            request_id=context.request_id,
            token_ids=array.array("i", prompt.padded).tolist() or prompt.token_ids.tolist(),
            model=request.model,
            cache_salt=request.cache_salt or None,
            priority=request.priority or 0,
        )
        for prompt in prompts
    ]


@router.post("/tokenize", tags=["tokens"])
async def tokenize(context: ContextDep) -> Response:
    """The token ids of a prompt or of a chat, in the format of vLLM."""
    raw, facts = await context.read()
    question, with_texts = context.converter.read_tokenize(raw, facts)
    (found,) = await _ask(context, question)
    ids = array.array("i", found.token_ids)
    if with_texts and len(ids) > _MAX_TOKEN_STRS:
        raise InvalidRequest(
            f"{question.param} has {len(ids)} tokens; return_token_strs is for at most "
            f"{_MAX_TOKEN_STRS}: send a shorter text, or leave return_token_strs out",
            param="return_token_strs",
        )
    answer = responses.TokenizeResponse(len(ids), facts.max_seq_len, ids.tolist())
    if with_texts:
        each = DecodeIds(token_ids=found.token_ids, skip_special=False, each=True)
        (decoded,) = await _ask(context, Question(each))
        answer.token_strs = await asyncio.to_thread(lambda: [*map(text_of_token, decoded.pieces)])
    return json_response(answer)


@router.post("/detokenize", tags=["tokens"])
async def detokenize(context: ContextDep) -> Response:
    """The text of token ids, in the format of vLLM."""
    raw, facts = await context.read()
    (found,) = await _ask(context, context.converter.read_detokenize(raw, facts))
    return json_response(responses.DetokenizeResponse(found.text))


async def _ask(context: CallContext, *questions: Question) -> list[TokenizeResult]:
    """The answers of a tokenizer. They wait in the same queue as the calls that generate."""
    engine = context.engine
    call = engine.open(context.caller())

    async def answers() -> list[TokenizeResult]:
        found = [await engine.ask(call, question) for question in questions]
        return [answer for answer in found if isinstance(answer, TokenizeResult)]

    try:
        return await unless_disconnected(context.request.receive, answers())
    finally:
        engine.close(call)
