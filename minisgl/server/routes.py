"""Every route of the HTTP API: generation, tokens, models, probes, the admin paths, the pages."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

import msgspec
from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

import minisgl
from minisgl.core import Cancelled, InvalidRequest
from minisgl.message.messages import DecodeIds
from minisgl.protocol import responses
from minisgl.protocol.messages_api import ModelInfo, ModelPage, TokenCount
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
from minisgl.request.call import Generation
from minisgl.request.convert import GenerateRequest
from minisgl.server.answer.disconnect import unless_disconnected
from minisgl.server.answer.messages import MessagesWriter
from minisgl.server.answer.openai import ResponseWriter, text_of_token
from minisgl.server.answer.responses import ResponsesWriter
from minisgl.server.answer.stream import EventStream, Writer
from minisgl.server.edge import probes
from minisgl.server.edge.middleware import json_response
from minisgl.server.handler import CallContext, CallDep, start, tokenized
from minisgl.server.pages import find_page

T = TypeVar("T")


router = APIRouter(redirect_slashes=False)
_get = partial(router.api_route, methods=["GET", "HEAD"])

_STARTED_AT = int(time.time())
_ANTHROPIC = "anthropic-version"  # the header that Anthropic's clients send with each request
_MAX_TOKEN_STRS = 2**17  # A thread makes their texts in 150 ms.


@router.post("/v1/chat/completions", tags=["generation"])
async def chat_completions(call: CallDep) -> Response:
    """Answer a chat, whole or as a stream of server-sent events."""
    return await _generate(CHAT, call)


@router.post("/v1/completions", tags=["generation"])
async def completions(call: CallDep) -> Response:
    """Complete one prompt or a list of prompts; a prompt is text or a list of token ids."""
    return await _generate(COMPLETIONS, call)


@router.post("/generate", tags=["generation"])
async def generate(call: CallDep) -> Response:
    """Complete a list of token ids; the answer holds the ids of the new tokens too."""
    return await _generate(GENERATE, call)


@router.post("/v1/responses", tags=["generation"])
async def create_response(call: CallDep) -> Response:
    """Answer a list of items in the format of OpenAI's Responses API. Nothing is stored."""
    return await _generate(RESPONSES, call)


@router.post("/v1/messages", tags=["generation"])
async def create_message(call: CallDep) -> Response:
    """Answer a chat in the format of Anthropic's Messages API."""
    return await _generate(MESSAGES, call)


@router.post("/v1/messages/count_tokens", tags=["tokens"])
async def count_tokens(call: CallDep) -> Response:
    """The number of prompt tokens of a chat in the format of Anthropic's Messages API."""
    return json_response(TokenCount(await _prompt_tokens(COUNT_TOKENS, call)))


@router.post("/v1/responses/input_tokens", tags=["tokens"])
async def input_tokens(call: CallDep) -> Response:
    """The number of prompt tokens of a request in the format of OpenAI's Responses API."""
    return json_response(InputTokens(input_tokens=await _prompt_tokens(INPUT_TOKENS, call)))


async def _prompt_tokens(route: str, call: CallContext) -> int:
    """The number of tokens of the prompt of this body."""
    raw, facts = await call.read()
    name, prompt = call.converter.read_prompt(route, raw, facts)
    found = await _ask_tokenizer(call, lambda g: call.client.tokenize(prompt, name, g))
    return len(found.token_ids)


# The writer of each API other than OpenAI's chat and completions.
_WRITERS: Mapping[str, Callable[[GenerateRequest], Writer]] = {
    RESPONSES: ResponsesWriter,
    MESSAGES: MessagesWriter,
}


async def _generate(route: str, call: CallContext) -> Response:
    """Start the request of the body, and respond with the whole answer or with a stream."""
    call.require_engine()
    raw, facts = await call.read()
    request = call.converter.read(route, raw, facts)
    del raw  # Otherwise the body stays in memory until the response is complete.
    writer = _WRITERS.get(route, ResponseWriter)(request)
    client = call.client
    priority = call.allowed_priority(request.priority)
    for feature in request.ignored:
        client.metrics.count("ignored_features_total", 1, feature)
    if call.service.config.cache_isolation == "key":
        # No name has a newline, so the salts of two names always differ.
        salt = f"{call.client_name}\n{request.cache_salt}"
        request = msgspec.structs.replace(request, cache_salt=salt)
    identity = call.request_id, call.client_name
    started = start(client, request, facts, *identity, priority, call.log)
    generation = await unless_disconnected(call.request.receive, started)
    if request.stream:
        return EventStream(client, writer, generation)
    try:
        ended = asyncio.ensure_future(generation.wait_until(generation.finished))
        await unless_disconnected(call.request.receive, ended)
        return Response(await writer.whole(generation), media_type="application/json")
    finally:
        client.close(generation)


@router.post("/v1/chat/completions/render", tags=["tokens"])
async def render_chat_completion(call: CallDep) -> Response:
    """The token ids of the prompt of a chat completion, in the format of vLLM."""
    (rendered,) = await _render(CHAT, call)
    return json_response(rendered)


@router.post("/v1/completions/render", tags=["tokens"])
async def render_completion(call: CallDep) -> Response:
    """The token ids of each prompt of a completion, in the format of vLLM."""
    return json_response(await _render(COMPLETIONS, call))


async def _render(route: str, call: CallContext) -> list[responses.RenderedPrompt]:
    """Tokenize the prompts of a body of the route `route`. Raises the errors of that route."""
    raw, facts = await call.read()
    request = call.converter.read(route, raw, facts)
    client = call.client
    prompts, _ = await _ask_tokenizer(call, lambda g: tokenized(client, g, request, facts))
    return [
        responses.RenderedPrompt(
            request_id=call.request_id,
            token_ids=found.token_ids.tolist(),
            model=request.model,
            cache_salt=request.cache_salt or None,
            priority=request.priority or 0,
        )
        for found, _ in prompts
    ]


@router.post("/tokenize", tags=["tokens"])
async def tokenize(call: CallDep) -> Response:
    """The token ids of a prompt or of a chat, in the format of vLLM."""
    raw, facts = await call.read()
    name, prompt, with_texts = call.converter.read_tokenize(raw, facts)
    ids = (await _ask_tokenizer(call, lambda g: call.client.tokenize(prompt, name, g))).token_ids
    if with_texts and len(ids) > _MAX_TOKEN_STRS:
        raise InvalidRequest(
            f"{name} has {len(ids)} tokens; return_token_strs is for at most {_MAX_TOKEN_STRS}: "
            "send a shorter text, or leave return_token_strs out",
            param="return_token_strs",
        )
    answer = responses.TokenizeResponse(len(ids), facts.max_seq_len, ids.tolist())
    if with_texts:
        each = DecodeIds(token_ids=ids.tobytes(), skip_special=False, each=True)
        pieces = (await _ask_tokenizer(call, lambda g: call.client.ask(each, g))).pieces
        answer.token_strs = await asyncio.to_thread(lambda: [*map(text_of_token, pieces)])
    return json_response(answer)


@router.post("/detokenize", tags=["tokens"])
async def detokenize(call: CallDep) -> Response:
    """The text of token ids, in the format of vLLM."""
    raw, facts = await call.read()
    ids = call.converter.read_detokenize(raw, facts)
    found = await _ask_tokenizer(call, lambda g: call.client.ask(ids, g))
    return json_response(responses.DetokenizeResponse(found.text))


async def _ask_tokenizer(call: CallContext, ask: Callable[[Generation], Awaitable[T]]) -> T:
    """Call `ask` and return its result.

    The call waits in the same queue as the calls that generate.
    """
    generation = call.client.open(1, call.request_id, call.client_name)
    try:
        return await unless_disconnected(call.request.receive, ask(generation))
    finally:
        call.client.close(generation)


@_get("/tokenizer_info", tags=["tokens"])
async def tokenizer_info(call: CallDep) -> Response:
    """The special tokens, the chat template and the vocabulary size, in the format of vLLM."""
    call.service.lifecycle.require_accepting()
    return json_response(call.service.lifecycle.tokenizer)


@_get("/version", tags=["models"])
async def version(call: CallDep) -> Response:
    """The version of minisgl."""
    return json_response(responses.VersionResponse(minisgl.__version__))


@_get("/v1/models", tags=["models"])
async def list_models(call: CallDep) -> Response:
    """Every name under which the model is served.

    With the header anthropic-version, the answer has the form of Anthropic's API.
    """
    names = call.service.config.served_names
    if _ANTHROPIC in call.request.headers:
        infos = [_model_info(call, name) for name in names]
        return json_response(ModelPage(data=infos, first_id=names[0], last_id=names[-1]))
    return json_response(responses.ModelList(data=[_model_card(call, name) for name in names]))


@_get("/v1/models/{model_id:path}", tags=["models"])
async def get_model(call: CallDep, model_id: str) -> Response:
    """One served name. Model ids may contain slashes. The header is as in /v1/models."""
    call.converter.check_model(model_id)
    in_anthropics_form = _ANTHROPIC in call.request.headers
    return json_response((_model_info if in_anthropics_form else _model_card)(call, model_id))


def _model_card(call: CallContext, name: str) -> responses.ModelCard:
    facts = call.service.lifecycle.facts
    return responses.ModelCard(
        id=name,
        created=_STARTED_AT,
        max_model_len=facts.max_seq_len if facts else None,
        sampling_defaults=call.converter.sampling_defaults(facts) if facts else None,
    )


def _model_info(call: CallContext, name: str) -> ModelInfo:
    facts = call.service.lifecycle.facts
    length = facts.max_seq_len if facts else None
    started_at = datetime.fromtimestamp(_STARTED_AT, UTC).isoformat().replace("+00:00", "Z")
    return ModelInfo(
        id=name,
        display_name=name,
        created_at=started_at,
        max_input_tokens=length,
        max_tokens=length,
    )


# `check_key` lets only the admin keys pass to the three admin paths.
@_get("/server_info", tags=["admin"])
async def server_info(call: CallDep) -> Response:
    """Version, limits, the model's facts and the live state. It holds no paths and no secrets."""
    service = call.service
    return json_response(
        {
            "version": minisgl.__version__,
            "phase": service.lifecycle.phase,
            "served_names": service.config.served_names,
            "open_requests": service.client.open_generations,
            "limits": service.config.limits,
            "scheduler": service.config.scheduler,
            "model": service.lifecycle.facts,
            "stats": service.stats,
        }
    )


@router.post("/abort", tags=["admin"])
async def abort(call: CallDep) -> Response:
    """End every open call whose x-request-id equals `request_id`."""
    request_id = call.converter.read_abort(await call.read_body())
    error = Cancelled("this request was aborted by an operator")
    return json_response(responses.AbortResponse(call.client.end_by_id(request_id, error)))


@router.post("/flush_cache", tags=["admin"])
async def flush_cache(call: CallDep) -> Response:
    """Forget the cached prefixes that no running request uses.

    Requests that arrive after the answer find none of them.
    """
    call.require_engine()
    call.service.lifecycle.require_accepting()
    call.client.flush_cache()
    return json_response(responses.StatusResponse("ok"))


@_get("/livez", tags=["probes"])
async def livez(call: CallDep) -> Response:
    """200 while every process runs and makes progress; otherwise 503."""
    return probes.answer(call.service.lifecycle, call.request.scope["path"])


@_get("/readyz", tags=["probes"])
@_get("/health", name="health", tags=["probes"])
@_get("/ping", name="ping", tags=["probes"])
async def readyz(call: CallDep) -> Response:
    """200 while the model is loaded and the server does not drain; otherwise 503."""
    return probes.answer(call.service.lifecycle, call.request.scope["path"])


@_get("/metrics", tags=["probes"])
async def metrics(call: CallDep) -> Response:
    """All metrics in the text format of Prometheus, or in OpenMetrics if the client accepts it."""
    client, accept = call.client, call.request.headers.get("accept", "")
    lifecycle, choices = call.service.lifecycle, client.open_choices
    is_stalled = lifecycle.stalled is not None
    body, media_type = client.metrics.render(accept, lifecycle.phase, is_stalled, choices)
    return Response(body, headers={"content-type": media_type})


@_get("/openapi.json", include_in_schema=False)
async def openapi_document(call: CallDep) -> Response:
    """The OpenAPI document of this server."""
    return json_response(call.request.app.openapi())


@_get("/", include_in_schema=False)
@_get("/playground/{name}", include_in_schema=False)
@_get("/docs", include_in_schema=False)
@_get("/docs/{name}", include_in_schema=False)
async def web_page(call: CallDep) -> Response:
    """A page, or a script or style sheet of a page."""
    path = call.request.scope["path"]
    config = call.service.config
    page = find_page(path, with_playground=not (config.no_playground or config.render_only))
    if page is None:
        raise HTTPException(404)
    # FileResponse sends the file in parts. It waits until the client has read the previous part.
    return FileResponse(page.files[path], headers=page.headers)
