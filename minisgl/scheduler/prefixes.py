"""In-batch prefix sharing: a request waits for an older one that computes the prefix of both."""

from collections.abc import Iterable

from minisgl.kvcache import common_prefix
from minisgl.scheduler.request import Req

MIN_SHARED_TOKENS = 64  # a request does not wait a step for a shorter shared prefix


def shared_with_older(req: Req, cached: int, others: Iterable[Req], page_size: int) -> int:
    """Return the number of leading tokens of `req` that an older request in `others` computes.

    The result is 0 if fewer than half of the uncached tokens are shared: `req` does not wait
    for so few. With this rule, the n choices of one prompt compute the prompt once. A burst of
    requests with the same system prompt computes the system prompt once.

    A request waits for older requests only, and these decrease in number. If it also waited for
    newer requests, it could wait forever: a newer request is admitted before it, computes the
    shared prefix and fails, then the next newer request does the same, and so on.
    """
    if req.sampling.prompt_logprobs is not None:
        return 0
    half = (len(req.tokens) - cached + 1) // 2
    min_shared = -(-(cached + max(half, MIN_SHARED_TOKENS)) // page_size) * page_size
    # The first min_shared tokens have to be equal. Compare the last of these tokens first,
    # because most prompts differ there. The slice is empty if the prompt has fewer tokens.
    last_needed = req.tokens[min_shared - 1 : min_shared].tobytes()
    if not last_needed:
        return 0
    for other in others:
        older = other.arrival_index < req.arrival_index and other.cache_salt == req.cache_salt
        if other.priority > req.priority or not older:
            continue  # a request of a later priority may have to wait for `req`
        if other.tokens[min_shared - 1 : min_shared].tobytes() == last_needed:
            shared = common_prefix(req.tokens[:-1], other.tokens)
            if shared >= min_shared:
                return shared // page_size * page_size
    return 0
