"""The context of one call, and the steps from its validated request to its first output.

A route asks for the `CallContext` by an annotation, and FastAPI passes it in:

    @router.get("/server_info")
    async def server_info(call: CallDep) -> Response: ...

Bodies are not declared in signatures: `CallContext` reads the raw bytes and msgspec decodes them.
`start` then admits the call, tokenizes its prompts, submits its choices and waits for output.
"""

import asyncio
from typing import Annotated, Protocol, TypeAlias

import msgspec
from fastapi import Depends, Request
from starlette.requests import ClientDisconnect

from minisgl import core
from minisgl.core import ModelFacts, PromptTooLong, SamplingParams
from minisgl.message import messages
from minisgl.request.call import ChoiceDelta, Generation
from minisgl.request.convert import GenerateRequest, RequestConverter, TokenArray
from minisgl.server.edge.connection import KEPT
from minisgl.server.engine import EngineClient, Tokenized
from minisgl.server.errors import NotReady, RendersOnly
from minisgl.server.observe.lifecycle import Lifecycle
from minisgl.settings.config import DEFAULT_CLIENT, ServerConfig

Prompts: TypeAlias = list[tuple[Tokenized, SamplingParams]]


class Service(Protocol):
    """The process that the routes belong to: the API server, or a test double."""

    config: ServerConfig
    client: EngineClient
    lifecycle: Lifecycle
    stats: messages.SchedulerStats | None


class CallContext:
    """One HTTP call: its request, its id, and the objects that its handler uses."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.request_id = str(request.scope["state"].get("request_id", ""))
        self.client_name = str(request.scope["state"].get("client", DEFAULT_CLIENT))
        self.log: dict[str, object] = request.scope["state"]["log"]
        self.service: Service = request.app.state.service
        self.converter: RequestConverter = request.app.state.converter
        self.client = self.service.client

    def allowed_priority(self, wanted: int | None) -> int:
        """The priority of a request. Raises InvalidRequest if its key may not use the number.

        A server without keys allows every number.
        """
        config = self.service.config
        if not config.api_key_hashes:
            return wanted or 0
        lowest = config.lowest_priorities.get(self.client_name, 0)
        if wanted is not None and wanted < lowest:
            message = f"priority must be at least {lowest} with this API key"
            raise core.InvalidRequest(message, param="priority")
        return max(lowest, 0) if wanted is None else wanted

    def require_engine(self) -> None:
        """Raise RendersOnly if the server has no engine."""
        if self.service.config.render_only:
            raise RendersOnly(
                f"this server only renders prompts; send {self.request.scope['path']} to a server "
                "without --render-only"
            )

    async def read(self) -> tuple[bytes, ModelFacts]:
        """Read the body of a call that needs the model. Returns it with the facts of the model.

        Raises NotReady if the server accepts no calls, or stops accepting them before the body is
        complete.
        """
        kept = self.request.scope["state"].get(KEPT, False)
        self.service.lifecycle.require_accepting(kept)
        return await self.read_body(), self.service.lifecycle.require_accepting(kept)

    async def read_body(self) -> bytes:
        """The raw body. Raises DeadlineExceeded when it is incomplete after max_wait_s."""
        max_wait_s = self.client.limits.max_wait_s
        try:
            async with asyncio.timeout(max_wait_s):
                # request.body() would keep the bytes until the response has been sent.
                return b"".join([part async for part in self.request.stream()])
        except ClientDisconnect:
            raise core.Cancelled("the client closed the connection") from None
        except asyncio.CancelledError:
            # uvicorn cancels the handler at the end of a drain, and would answer in plain text.
            raise NotReady("the server is shutting down") from None
        except TimeoutError:
            message = f"the body did not arrive within {max_wait_s:g} s"
            raise core.DeadlineExceeded(message, limit="max_wait_s") from None


async def _call(request: Request) -> CallContext:  # FastAPI runs plain functions in a thread.
    return CallContext(request)


CallDep = Annotated[CallContext, Depends(_call)]


async def start(
    client: EngineClient,
    request: GenerateRequest,
    facts: ModelFacts,
    request_id: str = "",
    client_name: str = DEFAULT_CLIENT,
    priority: int = 0,
    log: dict[str, object] | None = None,
) -> Generation:
    """Admit, tokenize and submit a call, and wait for its first output. log: as in `open`.

    The caller must close the returned generation. Raises RequestError when the call ends before
    its first output; the generation is then already closed.
    """
    generation = client.open(request.num_choices, request_id, client_name, priority, log)
    try:
        await _submit_all(client, generation, request, facts)
        await generation.wait_until(generation.has_output)
    except BaseException:
        client.close(generation)
        raise
    # `wait_until` has cleared `changed` for the first output. Set the event again, so that the
    # response does not wait for a second output before it reads the first.
    generation.changed.set()
    return generation


async def _submit_all(
    client: EngineClient, generation: Generation, request: GenerateRequest, facts: ModelFacts
) -> None:
    """Tokenize every prompt and submit its n choices; then add the echo if requested."""
    compiled = None
    if request.grammar is not None:
        compiled = await client.compile(request.grammar, generation)
    prompts, tokens = await tokenized(client, generation, request, facts, compiled)
    prompt_tokens = sum(len(found.token_ids) for found, _ in prompts)
    prediction = b""
    if request.prediction is not None:
        expected = await client.tokenize(request.prediction, "prediction", generation)
        # An answer has room for so many tokens after the prompt.
        prediction = expected.token_ids[: max(facts.max_seq_len - prompt_tokens, 0)].tobytes()
    predicted = len(prediction) // 4
    client.require_room(generation, prompt_tokens + predicted, tokens + predicted)
    for index, (found, sampling) in enumerate(prompts):
        token_ids = found.token_ids
        tail = token_ids[-messages.PROMPT_TAIL_TOKENS :].tolist()
        text = msgspec.structs.replace(request.text, prompt_tail=tail)
        choices = generation.choices[index * request.n : (index + 1) * request.n]
        if request.text.token_ids:
            prompt_ids = token_ids.tolist()
            for choice in choices:
                choice.delta = ChoiceDelta(prompt_ids=prompt_ids)
        add_req = messages.AddReq(
            uid=choices[0].uid,
            token_ids=token_ids.tobytes(),
            sampling=sampling.seeded(),
            prediction=prediction,
            cache_salt=request.cache_salt,
            count=request.n,
            client=generation.client,
            call=generation.choices[0].uid,
            priority=generation.priority,
            prefixes=found.prefixes,
        )
        client.submit(choices, add_req, text)
    if request.echo:
        echoes = []
        for (_, prompt), (found, _) in zip(request.prompts, prompts, strict=True):
            if isinstance(prompt, messages.TokenizeText):
                echoes.append(prompt.text)
                continue
            skip = request.text.skip_special_tokens
            ids = messages.DecodeIds(token_ids=found.token_ids.tobytes(), skip_special=skip)
            echoes.append((await client.ask(ids, generation)).text)
        for choice in generation.choices:
            prompt_index, number = divmod(choice.index, request.n)
            choice.text.insert(0, echoes[prompt_index])
            if request.sampling.prompt_logprobs is not None and number:
                choice.offset = len(echoes[prompt_index])


async def tokenized(
    client: EngineClient,
    generation: Generation,
    request: GenerateRequest,
    facts: ModelFacts,
    compiled: messages.GrammarResult | None = None,
) -> tuple[Prompts, int]:
    """Tokenize every prompt. Returns the prompts and the number of tokens as `fit_call` does.

    Raises the errors of `fit_max_tokens` and of `fit_call`.
    """
    prompts = []
    for name, prompt in request.prompts:
        found = await client.tokenize(prompt, name, generation)
        sampling = fit_max_tokens(request, found.token_ids, facts, name)
        if compiled is not None and request.grammar is not None:
            grammar = request.grammar.grammar(compiled, found.token_ids, found.thinks)
            sampling = msgspec.structs.replace(sampling, grammar=grammar)
        prompts.append((found, sampling))
    return fit_call(request, prompts, facts, client.limits.max_call_tokens)


def fit_max_tokens(
    request: GenerateRequest, token_ids: TokenArray, facts: ModelFacts, param: str
) -> SamplingParams:
    """The sampling parameters with max_tokens within the room that this prompt leaves.

    Raises PromptTooLong: for `param` when there is no room, and for max_tokens when there is less
    room than the client asked for.
    """
    size = len(token_ids)
    context = min(facts.max_seq_len, facts.kv_capacity_tokens)
    if size == 0:
        raise core.InvalidRequest(f"{param} has no tokens", param=param)
    if max(token_ids) >= facts.vocab_size:
        raise core.InvalidRequest(f"{param} has a token that the model does not know", param=param)
    wanted = request.sampling.max_tokens
    if size >= context:
        raise PromptTooLong(
            f"{param} has {size} tokens; the context length is {context} tokens, "
            "of which the answer needs at least one",
            param=param,
        )
    if wanted is None or size + wanted <= context:
        return request.sampling
    if not request.shrinks_max_tokens:
        raise PromptTooLong(
            f"{param} has {size} tokens and {request.max_tokens_param} is {wanted}, together "
            f"{size + wanted}; the context length is {context} tokens, so at most {context - size} "
            "are left for the answer",
            param=request.max_tokens_param,
        )
    return msgspec.structs.replace(request.sampling, max_tokens=context - size)


def fit_call(
    request: GenerateRequest, prompts: Prompts, facts: ModelFacts, max_call_tokens: int
) -> tuple[Prompts, int]:
    """The prompts with max_tokens within max_call_tokens, and the number of tokens of the call.

    A token counts once. With log-probabilities it counts once more for itself, and once for each
    likely token that is reported. Each prompt counts once, output tokens n times.
    Raises InvalidRequest when the call has no room, or less room than the client asked for.
    """
    first = request.sampling
    prompt_weight = 1 if first.prompt_logprobs is None else 2 + first.prompt_logprobs
    weight = request.n * (1 if first.logprobs is None else 2 + first.logprobs)
    prompt_tokens = prompt_weight * sum(len(found.token_ids) for found, _ in prompts)
    context = min(facts.max_seq_len, facts.kv_capacity_tokens)
    wanted = [each.max_tokens or context - len(found.token_ids) for found, each in prompts]
    tokens = prompt_tokens + weight * sum(wanted)
    if tokens <= max_call_tokens:
        return prompts, tokens
    most = (max_call_tokens - prompt_tokens) // (weight * len(prompts))
    if not request.shrinks_max_tokens or most < 1:
        lower = request.max_tokens_param + (", n or logprobs" if weight > 1 else "")
        remedy = f"lower {lower}" if most > 0 else "shorten the prompts"
        raise core.InvalidRequest(
            f"the call counts {tokens} tokens, {prompt_tokens} of its prompts and "
            f"{tokens - prompt_tokens} of its {request.num_choices} answers; at most "
            f"{max_call_tokens} are accepted: {remedy}",
            param=request.max_tokens_param,
            limit="max_call_tokens",
        )
    kept = [min(most, count) for count in wanted]
    fitted = [
        (found, msgspec.structs.replace(sampling, max_tokens=count))
        for (found, sampling), count in zip(prompts, kept, strict=True)
    ]
    return fitted, prompt_tokens + weight * sum(kept)
