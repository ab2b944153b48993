"""The routes beside generation: text to ids and back, and what an operator asks for."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import minisgl
from minisgl.core import Cancelled, InvalidRequest, ModelFacts
from minisgl.server import checks
from minisgl.server.engine_client import Generation
from minisgl.server.handler import read_body, read_call, unless_disconnected
from minisgl.server.middleware import answer
from minisgl.server.params import CHAT, IDS_PROMPT, TEXT_PROMPT, ParamTable
from minisgl.server.requests import RequestReader, parse_body
from minisgl.server.service import Service

T = TypeVar("T")
ABORT = checks.fields(
    {"request_id": checks.string(max_chars=128, empty=False)}, required=("request_id",)
)


def tokenize_check(table: ParamTable) -> checks.Check:
    """What /tokenize takes: either prompt or messages, as chat and completions have them."""
    chat = table.offered[CHAT]
    shared = {name: chat[name] for name in ("model", "messages", "chat_template_kwargs")}
    known = checks.fields({**shared, "prompt": TEXT_PROMPT, "add_special_tokens": checks.boolean})
    one_of = [
        {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
        for name in ("prompt", "messages")
    ]
    return checks.Check(known.run, {**known.schema, "oneOf": one_of})


def detokenize_check(table: ParamTable) -> checks.Check:
    known = {"model": table.model, "tokens": IDS_PROMPT, "skip_special_tokens": checks.boolean}
    return checks.fields(known, required=("tokens",))


def token_routes(service: Service, reader: RequestReader) -> list[Route]:
    """/tokenize and /detokenize, in the shapes that vLLM gives them."""
    tokenizing, detokenizing = tokenize_check(reader.table), detokenize_check(reader.table)

    async def read(request: Request, check: checks.Check) -> tuple[dict[str, Any], ModelFacts]:
        raw, facts = await read_call(service, request)
        return check("", parse_body(raw)), facts

    async def answered(request: Request, ask: Callable[[Generation], Awaitable[T]]) -> T:
        """What a tokenizer says; the question waits in one queue with the calls of the model."""
        call = service.client.open(1, request.scope["state"]["request_id"])
        try:
            return await unless_disconnected(request.receive, ask(call))
        finally:
            service.client.close(call)

    async def to_ids(request: Request) -> Response:
        given, facts = await read(request, tokenizing)
        if ("prompt" in given) == ("messages" in given):
            raise InvalidRequest("either prompt or messages is required", param="prompt")
        if "messages" in given:
            name, prompt = "messages", reader.chat_prompt(given, facts)
        else:
            name, add_special = "prompt", given.get("add_special_tokens", True)
            prompt = reader.text_prompt(name, given[name], facts, add_special)
        ids = await answered(request, lambda call: service.client.tokenize(prompt, name, call))
        found = {"count": len(ids), "max_model_len": facts.max_seq_len}
        return answer({**found, "tokens": ids.tolist()})

    async def to_text(request: Request) -> Response:
        given, facts = await read(request, detokenizing)
        ids = reader.ids_prompt("tokens", given["tokens"], facts)
        skips = given.get("skip_special_tokens", False)
        text = await answered(request, lambda call: service.client.decode(ids, skips, call))
        return answer({"prompt": text})

    paths = {"/tokenize": to_ids, "/detokenize": to_text}
    return [Route(path, handler, methods=["POST"]) for path, handler in paths.items()]


def admin_routes(service: Service) -> list[Route]:
    """/server_info, /abort, /flush_cache. `Auth` lets only admins come here."""

    async def info(request: Request) -> Response:
        """No paths and no secrets."""
        found = {
            "version": minisgl.__version__,
            "phase": service.lifecycle.phase,
            "served_names": service.config.served_names,
            "open_requests": service.client.open_generations,
            "limits": service.config.limits,
            "scheduler": service.config.scheduler,
            "model": service.lifecycle.facts,
            "stats": service.stats,
        }
        return answer(found)

    async def abort(request: Request) -> Response:
        given = ABORT("", parse_body(await read_body(service, request)))
        error = Cancelled("this request was aborted by an operator")
        return answer({"aborted": service.client.end_by_id(given["request_id"], error)})

    async def flush(request: Request) -> Response:
        """Requests that come after the answer find an empty cache (but for running prefixes)."""
        service.lifecycle.require_accepting()
        service.client.flush_cache()
        return answer({"status": "ok"})

    return [
        Route("/server_info", info),
        Route("/abort", abort, methods=["POST"]),
        Route("/flush_cache", flush, methods=["POST"]),
    ]
