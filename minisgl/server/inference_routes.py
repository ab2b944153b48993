"""The routes that clients call: chat, completions, tokenize, detokenize and the list of models."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.responses import Response

from minisgl.server.convert import RequestConverter
from minisgl.server.generation import Generation
from minisgl.server.handler import start
from minisgl.server.middleware import answer
from minisgl.server.protocol.requests import CHAT, COMPLETIONS, GENERATE
from minisgl.server.protocol.responses import (
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
)
from minisgl.server.response import EventStream, ResponseWriter
from minisgl.server.routing import (
    CallContext,
    CallDep,
    ConverterDep,
    Service,
    ServiceDep,
    new_router,
)

T = TypeVar("T")

generation_router = new_router("generation")
token_router = new_router("tokens")
model_router = new_router("models")


@generation_router.post("/v1/chat/completions")
async def chat_completions(call: CallDep, converter: ConverterDep) -> Response:
    """Answer a chat, whole or as a stream of server-sent events."""
    return await _generate(CHAT, call, converter)


@generation_router.post("/v1/completions")
async def completions(call: CallDep, converter: ConverterDep) -> Response:
    """Complete a text, a list of token ids, or a list of either."""
    return await _generate(COMPLETIONS, call, converter)


@generation_router.post("/generate")
async def generate(call: CallDep, converter: ConverterDep) -> Response:
    """Complete a list of token ids; the answer holds the ids of the new tokens too."""
    return await _generate(GENERATE, call, converter)


async def _generate(route: str, call: CallContext, converter: RequestConverter) -> Response:
    """The common path of the three routes above, up to the choice of the response."""
    raw, facts = await call.read()
    request = converter.read(route, raw, facts)
    del raw  # Otherwise the body stays in memory until the response is complete.
    writer = ResponseWriter(request)
    client = call.client
    started = start(client, request, facts, call.request_id)
    generation = await call.unless_disconnected(started)
    if request.stream:
        return EventStream(client, writer, generation)
    try:
        ended = asyncio.ensure_future(generation.wait_until(generation.finished))
        await call.unless_disconnected(ended)
        return Response(writer.whole(generation), media_type="application/json")
    finally:
        client.close(generation)


@token_router.post("/tokenize")
async def tokenize(call: CallDep, converter: ConverterDep) -> Response:
    """The token ids of a prompt or of a chat, in the format of vLLM."""
    raw, facts = await call.read()
    name, prompt = converter.read_tokenize(raw, facts)
    token_ids = await _ask_tokenizer(call, lambda g: call.client.tokenize(prompt, name, g))
    return answer(TokenizeResponse(len(token_ids), facts.max_seq_len, token_ids.tolist()))


@token_router.post("/detokenize")
async def detokenize(call: CallDep, converter: ConverterDep) -> Response:
    """The text of token ids, in the format of vLLM."""
    raw, facts = await call.read()
    token_ids, skip_special = converter.read_detokenize(raw, facts)
    text = await _ask_tokenizer(call, lambda g: call.client.detokenize(token_ids, skip_special, g))
    return answer(DetokenizeResponse(text))


async def _ask_tokenizer(call: CallContext, ask: Callable[[Generation], Awaitable[T]]) -> T:
    """The result of `ask`, which waits in the same queue as the calls that generate."""
    generation = call.client.open(1, call.request_id)
    try:
        return await call.unless_disconnected(ask(generation))
    finally:
        call.client.close(generation)


@model_router.get("/v1/models")
async def list_models(service: ServiceDep) -> Response:
    """Every name under which the model is served."""
    cards = [_model_card(service, name) for name in service.config.served_names]
    return answer(ModelList(data=cards))


@model_router.get("/v1/models/{model_id:path}")
async def get_model(call: CallDep, service: ServiceDep, converter: ConverterDep) -> Response:
    """One served name. Model ids may contain slashes."""
    # Not a parameter of this function: FastAPI would validate it with pydantic.
    model_id = call.request.path_params["model_id"]
    converter.check_model(model_id)
    return answer(_model_card(service, model_id))


_STARTED_AT = int(time.time())


def _model_card(service: Service, name: str) -> ModelCard:
    facts = service.lifecycle.facts
    length = facts.max_seq_len if facts else None
    return ModelCard(id=name, created=_STARTED_AT, max_model_len=length)
