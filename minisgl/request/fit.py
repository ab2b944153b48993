"""Fits the prompts of a call and its max_tokens into the context and into max_call_tokens."""

import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from minisgl.core import InvalidRequest, ModelFacts, PromptTooLong, SamplingParams
from minisgl.message.messages import GrammarResult, PromptImage, TokenizeResult
from minisgl.request.convert import CallRequest, TokenArray
from minisgl.request.question import Answer
from minisgl.structured.thinking import for_prompt


class FittedPrompt(NamedTuple):
    """The ids of a prompt, the final parameters of its answers, and prefixes as in AddReq.

    images, padded: as in TokenizeResult.
    """

    token_ids: TokenArray
    sampling: SamplingParams
    prefixes: tuple[int, int] = (0, 0)
    images: tuple[PromptImage, ...] = ()
    padded: bytes = b""


def fit_prompts(
    request: CallRequest,
    answers: Iterator[Answer],
    compiled: GrammarResult | None,
    facts: ModelFacts,
    max_call_tokens: int,
) -> tuple[list[FittedPrompt], int]:
    """The prompts with their final parameters, and the number of tokens that `fit_call` counts.

    answers: of `request.prompt_questions`. compiled: the grammar of the request, if it has been
    compiled.
    Raises the errors of `fit_max_tokens` and of `fit_call`.
    """
    ids, results, wanted = [], [], []
    for name, prompt in request.prompts:
        result = TokenizeResult(uid=0)
        if isinstance(prompt, msgspec.Struct):
            answer = next(answers)
            assert isinstance(answer, TokenizeResult), "a tokenizer must answer; this is a bug"
            result, prompt = answer, array.array("i", answer.token_ids)
        wanted.append(fit_max_tokens(request, prompt, facts, name))
        ids.append(prompt)
        results.append(result)
    sizes = [len(each) for each in ids]
    counts, tokens = fit_call(request, sizes, wanted, facts, max_call_tokens)
    fitted = []
    for each, result, max_tokens in zip(ids, results, counts, strict=True):
        grammar = request.sampling.grammar
        if compiled is not None and compiled.grammar is not None:
            grammar = for_prompt(compiled.grammar, each, result.thinks)
        sampling = msgspec.structs.replace(
            request.sampling, max_tokens=max_tokens, grammar=grammar
        ).seeded()
        fitted.append(FittedPrompt(each, sampling, result.prefixes, result.images, result.padded))
    return fitted, tokens


def fit_max_tokens(
    request: CallRequest, token_ids: TokenArray, facts: ModelFacts, param: str
) -> int | None:
    """max_tokens within the room that this prompt leaves. None: all of the room.

    Raises PromptTooLong: for `param` when there is no room, and for max_tokens when there is less
    room than the client asked for.
    """
    size = len(token_ids)
    context = min(facts.max_seq_len, facts.kv_capacity_tokens)
    if size == 0:
        raise InvalidRequest(f"{param} has no tokens", param=param)
    if max(token_ids) >= facts.vocab_size:
        raise InvalidRequest(f"{param} has a token that the model does not know", param=param)
    wanted = request.sampling.max_tokens
    if size >= context:
        raise PromptTooLong(
            f"{param} has {size} tokens; the context length is {context} tokens, "
            "of which the answer needs at least one",
            param=param,
        )
    if wanted is None or size + wanted <= context:
        return wanted
    if not request.shrinks_max_tokens:
        raise PromptTooLong(
            f"{param} has {size} tokens and {request.max_tokens_param} is {wanted}, together "
            f"{size + wanted}; the context length is {context} tokens, so at most {context - size} "
            "are left for the answer",
            param=request.max_tokens_param,
        )
    return context - size


def fit_call(
    request: CallRequest,
    sizes: Sequence[int],
    wanted: Sequence[int | None],
    facts: ModelFacts,
    max_call_tokens: int,
) -> tuple[Sequence[int | None], int]:
    """max_tokens of each prompt within max_call_tokens, and the number of tokens of the call.

    sizes: the number of tokens of each prompt. wanted: max_tokens of each prompt.
    A token counts once. With log-probabilities it counts once more for itself, and once for each
    likely token that is reported. Each prompt counts once, output tokens n times.
    Raises InvalidRequest when the call has no room, or less room than the client asked for.
    """
    first = request.sampling
    prompt_weight = 1 if first.prompt_logprobs is None else 2 + first.prompt_logprobs
    weight = request.n * (1 if first.logprobs is None else 2 + first.logprobs)
    prompt_tokens = prompt_weight * sum(sizes)
    context = min(facts.max_seq_len, facts.kv_capacity_tokens)
    counts = [count or context - size for size, count in zip(sizes, wanted, strict=True)]
    tokens = prompt_tokens + weight * sum(counts)
    if tokens <= max_call_tokens:
        return wanted, tokens
    most = (max_call_tokens - prompt_tokens) // (weight * len(sizes))
    if not request.shrinks_max_tokens or most < 1:
        lower = request.max_tokens_param + (", n or logprobs" if weight > 1 else "")
        remedy = f"lower {lower}" if most > 0 else "shorten the prompts"
        raise InvalidRequest(
            f"the call counts {tokens} tokens, {prompt_tokens} of its prompts and "
            f"{tokens - prompt_tokens} of its {request.num_choices} answers; at most "
            f"{max_call_tokens} are accepted: {remedy}",
            param=request.max_tokens_param,
            limit="max_call_tokens",
        )
    kept = [min(most, count) for count in counts]
    return kept, prompt_tokens + weight * sum(kept)
