"""`step_budget`: the number of prompt tokens of the next step, and its prices of images."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import chain

import numpy as np

from minisgl.core import StepCost, StepWork
from minisgl.core.config import smallest_chunk
from minisgl.scheduler.image_prices import ImagePrices
from minisgl.scheduler.request import Req
from minisgl.scheduler.view import Decode, View

# A chunk of the first priority adds its tokens at no less than LEAST_RATE times the rate of the
# largest step, in a step of at most STRETCH times the limit.
LEAST_RATE = 0.5
STRETCH = 2.0
# No chunk makes a step longer than this. On a CPU, one chunk of a long prompt takes minutes without
# this limit. A GPU is hardly ever above it. The server counts as stalled after 3 s (Watchdog).
MAX_STEP_S = 2.0
# LOW_SLOWDOWN replaces a larger max_slowdown in a step whose prompts are all of later priorities. A
# longer step-time target still holds.
LOW_SLOWDOWN = 1.5
# A queue with n times LONG_QUEUE_S of prefill time multiplies the limit of the step time by n, but
# at most by MAX_QUEUE_FACTOR. Even then, running streams get about ten tokens per second.
LONG_QUEUE_S = 0.25
MAX_QUEUE_FACTOR = 4.0
EVEN_STEP_TOKENS = 512  # larger steps hardly lower the time per token of an 8B model


def step_budget(view: View, prefilling: Sequence[Req], decode: Decode, urgent: bool) -> ImagePrices:
    """Return the largest number of prompt tokens of the next step, and the prices of its images.

    prefilling: the admitted prompts. If it is empty, `view.waiting` is not. decode: the rows that
    decode beside them. urgent: the first priority in use has prompts.

    The number is prefill_budget_tokens while no request decodes, except on a server with several
    clients or several priorities, and within MAX_STEP_S. In all other cases it is lower, so that
    prompts do not slow down decoding requests too much:

    - With a step-time target (a server), the predicted step time has a limit (`_limit_s`), above
      the smallest chunk. Prompts of the first priority may stretch it (STRETCH).
    - Without one (the offline LLM), only the total time counts. Prompts of requests with few
      output tokens are then spread evenly over the decode steps: `_even_tokens`.

    Images may use the whole difference between the limit and the time of the step without them. If
    the number exceeds the limit, they may use the time of these prompt tokens.
    """
    config, cost, work = view.config, view.cost, view.work(decode)
    limit_s = _limit_s(view, prefilling, work, urgent)
    within = _tokens_within(view, prefilling, work, limit_s, urgent)
    tokens = min(config.prefill_budget_tokens, within)
    if config.target_step_ms is None and len(decode.rows):
        tokens = min(tokens, _even_tokens(view, prefilling, decode))
    prices = ImagePrices(tokens, cost.seconds[-1] / cost.tokens[-1])
    if config.target_step_ms is None or not (work.tokens and view.images.limits.rows):
        return prices
    start, _ = view.rest(next(chain(prefilling, view.waiting)))
    most_s = max(limit_s, _step_s(cost, work, start, tokens))
    # A plan calls it for each waiting client, mostly with the same chunks.
    return prices._replace(spare_s=cache(lambda chunk: most_s - _step_s(cost, work, start, chunk)))


def further_tokens(view: View, prefilling: Sequence[Req], decode: Decode) -> int:
    """Return the largest number of prompt tokens of a step with further choices of running calls.

    As step_budget for prompts of later priorities. If a step of the next preferred size would be
    too long, the result is exactly the smallest chunk.
    """
    tokens = step_budget(view, prefilling, decode, urgent=False).budget
    work = view.work(decode)
    whole_s = view.cost.predict_s(work._replace(tokens=work.tokens + tokens))
    slowdown = min(view.config.max_slowdown, LOW_SLOWDOWN)
    within = whole_s <= slowdown * view.cost.predict_s(work)
    return tokens if within else min(tokens, smallest_chunk(view.memory.page_size))


def _even_tokens(view: View, prefilling: Sequence[Req], decode: Decode) -> int:
    """Spread prompts over the decode steps, in steps of equal size.

    A decode step with few requests reads all weights for few tokens, so prompt tokens in the
    same step cost little. The run ends with the request that has the most output tokens left,
    and prompt tokens must not delay this end. For each other request, the function computes the
    latest step in which the request has to start to decode. By this step, the prompts of the
    request and of all requests before it must be complete. The function returns the smallest
    number of prompt tokens per step that is enough for all requests, rounded up to a step size.
    It assumes that each request generates as many tokens as it may.

    The function returns all of prefill_budget_tokens in two cases: when more requests wait than
    rows are free, and when prompt tokens cost more in steps with decode tokens than in a large
    step without them, as in small models.
    """
    budget, num_decode = view.config.prefill_budget_tokens, int(decode.tokens.sum())
    table, waiting = view.table, view.waiting
    if len(waiting) > table.rows.num_free:
        return budget
    prompts = [*prefilling, *waiting]
    start, end = np.array([view.rest(req) for req in prompts]).T
    outputs = np.array([req.max_total_tokens for req in prompts]) - end
    decode_steps = (table.max_total_tokens[decode.rows] - table.computed[decode.rows]).max()
    steps_until_start = np.maximum(max(decode_steps, outputs.max()) - outputs, 1)
    needed = min(int((np.cumsum(end - start) // steps_until_start).max()) + 1, budget)
    # Prefill continues even if more requests decode than a step of even size has tokens.
    needed = max(needed, EVEN_STEP_TOKENS // 2)
    size = view.sizes[bisect_left(view.sizes, max(num_decode + needed, EVEN_STEP_TOKENS))]
    chunk = size - num_decode
    mixed_s = view.cost.predict_s(StepWork(size)) - view.cost.predict_s(StepWork(num_decode))
    separate_s = view.cost.predict_s(StepWork(budget)) * chunk / budget
    return chunk if mixed_s < separate_s else budget


def _limit_s(view: View, prefilling: Sequence[Req], work: StepWork, urgent: bool) -> float:
    """Return the limit of the predicted time of a step, in seconds. work: of its decoding rows.

    The offline LLM has MAX_STEP_S. A server has it too while no request decodes, unless it has
    several clients or several priorities. In all other cases, the limit is the larger of two times
    within MAX_STEP_S: the step-time target, and the predicted decode-only step times max_slowdown,
    or times LOW_SLOWDOWN if all prompts are of later priorities.

    While a long queue waits, the limit grows with the queue, up to MAX_QUEUE_FACTOR times, for two
    reasons. The clients in the queue wait for their first token, and small chunks make them wait
    longer. Small chunks also cost throughput: when a step is compute-bound, a decode token takes
    45 us next to a chunk and 27 us next to other decode tokens (8B model, H200).

    If there are several clients or priorities, the limit grows at most half as far. Each client
    has a queue for each priority of its prompts, and the shortest of these queues counts.
    Otherwise the queue of one client would delay the first tokens of the others. If the first
    priority in use has no prompts, it counts as an empty queue, since its next request must not
    wait for a long step.
    """
    config, waiting = view.config, view.waiting
    shared = len(waiting.clients) > 1 or waiting.several_priorities
    if config.target_step_ms is None or not (shared or work.tokens):
        return MAX_STEP_S
    slowdown = config.max_slowdown if urgent else min(config.max_slowdown, LOW_SLOWDOWN)
    limit_s = max(config.target_step_ms / 1000, slowdown * view.cost.predict_s(work))
    queued = {(r.priority, r.client): 0 for r in prefilling} | waiting.uncached_tokens
    shortest = min(queued.values()) if urgent else 0
    # A request that arrives during step n enters step n + 2, so it waits for two steps.
    most = MAX_QUEUE_FACTOR / 2 if shared else MAX_QUEUE_FACTOR
    factor = min(max(view.cost.predict_s(StepWork(shortest)) / LONG_QUEUE_S, 1.0), most)
    return min(limit_s * factor, MAX_STEP_S)


def _tokens_within(
    view: View, prefilling: Sequence[Req], work: StepWork, limit_s: float, urgent: bool
) -> int:
    """Return the prompt tokens of the largest step with at most this predicted time.

    work: of the decoding rows. The result is at least the smallest chunk.

    Prompts of the first priority (urgent) may stretch the limit while they add tokens slowly
    (LEAST_RATE). This happens with experts: 64 tokens read almost all weights, and 1,024 take
    hardly longer. In a limit between the two times, prompts would wait for seconds.
    """
    sizes, (start, _) = view.sizes, view.rest(next(chain(prefilling, view.waiting)))
    num_decode, most, cost = work.tokens, view.config.prefill_budget_tokens, view.cost

    def step_s(tokens: int) -> float:
        return _step_s(cost, work, start, tokens - num_decode)

    def is_slow(tokens: int) -> bool:
        added_s = cost.predict_s(work._replace(tokens=tokens)) - cost.predict_s(work)
        return (tokens - num_decode) * cost.predict_s(StepWork(most)) < LEAST_RATE * most * added_s

    smallest = bisect_left(sizes, num_decode + smallest_chunk(view.memory.page_size))
    chosen = max(bisect_right(sizes, limit_s, lo=smallest, key=step_s) - 1, smallest)
    last_s = min(STRETCH * limit_s, MAX_STEP_S) if urgent else 0.0
    for larger in sizes[chosen + 1 :]:
        if not is_slow(sizes[chosen]) or step_s(larger) > last_s:
            break
        chosen += 1
    return sizes[chosen] - num_decode


def _step_s(cost: StepCost, work: StepWork, start: int, chunk: int) -> float:
    """Return the seconds of a step with decoding rows (work) and a chunk from token `start` on."""
    pairs = chunk * (start + chunk // 2)
    return cost.predict_s(work._replace(tokens=work.tokens + chunk, prefill_pairs=pairs))
