"""The routes beside generation: text to ids and back, and what an operator asks for."""

import array
from typing import Any

import msgspec
from fastapi import FastAPI, Request

import minisgl
from minisgl.core import Cancelled, InvalidRequest, ModelFacts
from minisgl.message import DecodeIds, ToTokenizer
from minisgl.server import checks
from minisgl.server.generate import read_body, tokenize, unless_disconnected
from minisgl.server.params import CHAT, IDS_PROMPT, TEXT_PROMPT, ParamTable, as_it_is
from minisgl.server.requests import Prompt, RequestReader, parse_body
from minisgl.server.service import Service

ABORT = checks.fields(
    {"request_id": checks.string(max_chars=128, empty=False)}, required=("request_id",)
)


def tokenize_check(table: ParamTable) -> checks.Check:
    """What /tokenize takes: either prompt or messages, as chat and completions have them."""
    chat = table.offered[CHAT]
    shared = {name: chat[name] for name in ("model", "messages", "chat_template_kwargs")}
    prompt = checks.Check(as_it_is, TEXT_PROMPT)
    known = checks.fields({**shared, "prompt": prompt, "add_special_tokens": checks.boolean})
    one_of = [
        {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
        for name in ("prompt", "messages")
    ]
    return checks.Check(known.run, {**known.schema, "oneOf": one_of})


def detokenize_check(table: ParamTable) -> checks.Check:
    """What /detokenize takes."""
    ids = checks.Check(as_it_is, IDS_PROMPT)
    known = {"model": table.model, "tokens": ids, "skip_special_tokens": checks.boolean}
    return checks.fields(known, required=("tokens",))


def add_token_routes(app: FastAPI, service: Service, reader: RequestReader) -> None:
    """/tokenize and /detokenize, in the shapes that vLLM gives them."""
    tokenizing, detokenizing = tokenize_check(reader.table), detokenize_check(reader.table)

    async def read(request: Request, check: checks.Check) -> tuple[dict[str, Any], ModelFacts]:
        raw, facts = await read_body(service.lifecycle, request)
        return check("", parse_body(raw)), facts

    async def to_ids(request: Request) -> dict[str, Any]:
        given, facts = await read(request, tokenizing)
        if ("prompt" in given) == ("messages" in given):
            raise InvalidRequest("either prompt or messages is required", param="prompt")
        name = "messages" if "messages" in given else "prompt"
        if name == "messages":
            prompt: Prompt = reader.chat_prompt(given, facts)
        else:
            text = reader.text_prompt(name, given["prompt"], facts)
            add_special = given.get("add_special_tokens", True)
            prompt = msgspec.structs.replace(text, add_special=add_special)
        work = tokenize(service.client, prompt, name)
        ids = await unless_disconnected(request.receive, work)
        return {"count": len(ids), "max_model_len": facts.max_seq_len, "tokens": ids.tolist()}

    async def to_text(request: Request) -> dict[str, Any]:
        given, facts = await read(request, detokenizing)
        prompt = reader.ids_prompt("tokens", given["tokens"], facts)
        ids = array.array("i", prompt.token_ids)
        skip_special = given.get("skip_special_tokens", False)

        def message(uid: int) -> ToTokenizer:
            return DecodeIds(uid=uid, token_ids=ids.tobytes(), skip_special=skip_special)

        return {
            "prompt": await unless_disconnected(request.receive, service.client.decode(message))
        }

    app.post("/tokenize")(to_ids)
    app.post("/detokenize")(to_text)


def add_admin_routes(app: FastAPI, service: Service) -> None:
    """/server_info, /abort, /flush_cache. `Auth` lets only admins come here."""

    async def info() -> dict[str, Any]:
        """No paths and no secrets."""
        config, facts, stats = service.config, service.lifecycle.facts, service.stats
        return {
            "version": minisgl.__version__,
            "phase": service.lifecycle.phase.value,
            "served_names": config.served_names,
            "open_requests": service.client.open_generations,
            "limits": msgspec.to_builtins(config.limits),
            "scheduler": msgspec.to_builtins(config.scheduler),
            "model": None if facts is None else msgspec.to_builtins(facts),
            "stats": None if stats is None else msgspec.to_builtins(stats),
        }

    async def abort(request: Request) -> dict[str, Any]:
        raw, _ = await read_body(service.lifecycle, request)
        given = ABORT("", parse_body(raw))
        error = Cancelled("this request was aborted by an operator")
        return {"aborted": service.client.end_by_id(given["request_id"], error)}

    async def flush() -> dict[str, Any]:
        """Requests that come after the answer find an empty cache (but for running prefixes)."""
        service.lifecycle.require_accepting()
        service.client.flush_cache()
        return {"status": "ok"}

    app.get("/server_info")(info)
    app.post("/abort")(abort)
    app.post("/flush_cache")(flush)
