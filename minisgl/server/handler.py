"""One call from validated request to texts: tokenize, check against the model, submit, wait."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from minisgl.core import (
    Cancelled,
    InvalidRequest,
    ModelFacts,
    PromptTooLong,
    SamplingParams,
)
from minisgl.core.sampling import MAX_SEED
from minisgl.message import AddReq, TokenizeText
from minisgl.server.convert import GenerateRequest, TokenArray
from minisgl.server.engine_client import EngineClient, Generation

# A character has at most four bytes, so at most three tokens of it can lie in the prompt.
PROMPT_TAIL_TOKENS = 4

T = TypeVar("T")
Receive = Callable[[], Awaitable[Any]]


async def start(
    client: EngineClient, request: GenerateRequest, facts: ModelFacts, request_id: str = ""
) -> Generation:
    """Admit, tokenize and submit; returns when the first output is there.

    Raises RequestError before any output; then nothing of the call is left. Otherwise the caller
    must close the generation.
    """
    generation = client.open(request.num_choices, request_id)
    try:
        await _until_first_output(client, generation, request, facts)
    except BaseException:
        client.close(generation)
        raise
    generation.changed.set()  # the first output has not been looked at yet
    return generation


async def _until_first_output(
    client: EngineClient, generation: Generation, request: GenerateRequest, facts: ModelFacts
) -> None:
    prompts = []
    for name, prompt in request.prompts:
        token_ids = await client.tokenize(prompt, name, generation)
        prompts.append((token_ids, fit_max_tokens(request, token_ids, facts, name)))
    client.require_room(sum(len(token_ids) for token_ids, _ in prompts))
    for index, (token_ids, sampling) in enumerate(prompts):
        for sibling in range(request.n):
            choice = generation.choices[index * request.n + sibling]
            seeded = _sibling_seed(sampling, sibling)
            adds = len(token_ids) if sibling == 0 else 0
            client.submit(choice, _add_req(choice.uid, token_ids, seeded, request), adds)
    if request.text.token_ids:
        generation.prompt_ids = [token_ids.tolist() for token_ids, _ in prompts]
    if request.echo:
        skip_special = request.text.skip_special_tokens
        generation.echoes = [
            prompt.text
            if isinstance(prompt, TokenizeText)
            else await client.decode(token_ids, skip_special, generation)
            for (_, prompt), (token_ids, _) in zip(request.prompts, prompts, strict=True)
        ]
    await generation.until(generation.opened)


def fit_max_tokens(
    request: GenerateRequest, token_ids: TokenArray, facts: ModelFacts, param: str
) -> SamplingParams:
    """The sampling parameters with max_tokens within the room that this prompt leaves."""
    size = len(token_ids)
    context = min(facts.max_seq_len, facts.kv_capacity_tokens)
    if size == 0:
        raise InvalidRequest(f"{param} has no tokens", param=param)
    if max(token_ids) >= facts.vocab_size:
        raise InvalidRequest(f"{param} has a token that the model does not know", param=param)
    sampling = request.sampling
    wanted = sampling.max_tokens
    if size >= context:
        raise PromptTooLong(
            f"{param} has {size} tokens; the context length is {context} tokens, "
            "of which the answer needs at least one",
            param=param,
        )
    if wanted is None or size + wanted <= context:
        return sampling
    if request.explicit_max_tokens:
        raise PromptTooLong(
            f"{param} has {size} tokens and max_tokens is {wanted}, together {size + wanted}; "
            f"the context length is {context} tokens",
            param=param,
        )
    return msgspec.structs.replace(sampling, max_tokens=context - size)


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`; when the client goes away first, cancel it and raise Cancelled.

    A coroutine begins at once, not as a task that waits for its turn: of a burst of calls the first
    reaches the scheduler before the last has been parsed. What wakes up for each token had better
    be a task: waking a coroutine goes through all that wait for it, some 4 us of CPU an event.
    """
    gone, working = asyncio.timeout(None), True

    async def watch() -> None:
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        finally:  # who can no longer be heard is gone as well
            if working:
                gone.reschedule(asyncio.get_running_loop().time())

    watcher = asyncio.ensure_future(watch())
    try:
        async with gone:
            return await work
    except TimeoutError:
        if not gone.expired():
            raise
        raise Cancelled("the client closed the connection") from None
    finally:
        working = False
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


def _add_req(
    uid: int, token_ids: TokenArray, sampling: SamplingParams, request: GenerateRequest
) -> AddReq:
    text = msgspec.structs.replace(
        request.text,
        prompt_tail=token_ids[-PROMPT_TAIL_TOKENS:].tolist(),
        prompt_ids=b"" if sampling.prompt_logprobs is None else token_ids.tobytes(),
    )
    return AddReq(
        uid=uid,
        token_ids=token_ids.tobytes(),
        sampling=sampling,
        text=text,
        cache_salt=request.cache_salt,
    )


def _sibling_seed(sampling: SamplingParams, sibling: int) -> SamplingParams:
    """Each sibling draws by a seed of its own: fresh, or derived from the one that was given."""
    if sampling.seed is None or sibling == 0:
        return sampling.seeded()
    seed = sampling.seed + sibling
    return msgspec.structs.replace(sampling, seed=seed if seed <= MAX_SEED else seed - 2**64)
