"""`PrefillBudget`: the number of prompt tokens of the next step."""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from minisgl.core import Int32Array, SchedulerConfig, StepCost, step_sizes
from minisgl.scheduler.queue import WaitingQueue
from minisgl.scheduler.request import Req
from minisgl.scheduler.request_table import RequestTable

MIN_CHUNK_TOKENS = 32  # the smallest chunk; prefill continues even in steps above the time limit
# No chunk makes a step longer than this. On a CPU, one chunk of a long prompt takes minutes without
# this limit. A GPU is hardly ever above it. The server counts as stalled after 3 s (Watchdog).
MAX_STEP_S = 2.0
MAX_SLOWDOWN = 2.25  # a step with a chunk may take this many times the decode-only step
LOW_SLOWDOWN = 1.5  # the same for a step with prompts of later priorities only
# A queue with n times LONG_QUEUE_S of prefill time multiplies the limit of the step time by n, but
# at most by MAX_QUEUE_FACTOR. Even then, running streams get about ten tokens per second.
LONG_QUEUE_S = 0.25
MAX_QUEUE_FACTOR = 4.0
EVEN_STEP_TOKENS = 512  # larger steps hardly lower the time per token of an 8B model


@dataclass(slots=True)
class PrefillBudget:
    """Limits the prompt tokens of a step, so that they do not slow down decoding requests too much.

    The limit is prefill_budget_tokens while no request decodes, except on a server with several
    clients or several priorities, and within MAX_STEP_S. In all other cases the limit is lower:

    - With a step-time target (a server), the predicted step time stays below a limit:
      `_timed_tokens`.
    - Without one (the offline LLM), only the total time counts. Prompts of requests with few
      output tokens are then spread evenly over the decode steps: `_even_tokens`.

    _prefilling and _waiting are the planner's queues, in the order of computation.
    The budget reads them at each call; the planner keeps changing them. _sizes are the step sizes
    in tokens, in rising order.
    """

    _config: SchedulerConfig
    _table: RequestTable
    _prefilling: Sequence[Req]
    _waiting: WaitingQueue
    _clients: Collection[str]  # every client so far
    _sizes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        most_tokens = self._config.prefill_budget_tokens + self._table.rows.size
        self._sizes = step_sizes(most_tokens + 1024)

    def tokens(self, decode_rows: Int32Array, cost: StepCost, urgent: bool) -> int:
        """Return the largest number of prompt tokens that the next step may contain.

        decode_rows: int32, the rows that decode in this step. cost: predicts step times. urgent:
        the first priority in use has prompts.
        """
        budget = self._config.prefill_budget_tokens
        target_ms = self._config.target_step_ms
        if not (self._prefilling or self._waiting):
            return budget
        budget = min(budget, self._tokens_within(decode_rows, cost, MAX_STEP_S))
        shared = len(self._clients) > 1 or self._waiting.has_classes
        if not len(decode_rows) and (not shared or target_ms is None):
            return budget
        if target_ms is None:
            return min(self._even_tokens(decode_rows, cost), budget)
        return min(self._timed_tokens(decode_rows, cost, target_ms / 1000, urgent), budget)

    def _even_tokens(self, decode_rows: Int32Array, cost: StepCost) -> int:
        """Spread prompts over the decode steps, in steps of equal size.

        A decode step with few requests reads all weights for few tokens, so prompt tokens in the
        same step cost little. The run ends with the request that has the most output tokens left,
        and prompt tokens must not delay this end. For each other request, the method computes the
        latest step in which the request has to start to decode. By this step, the prompts of the
        request and of all requests before it must be complete. The method returns the smallest
        number of prompt tokens per step that is enough for all requests, rounded up to a step size.
        It assumes that each request generates as many tokens as it may.

        The method returns all of prefill_budget_tokens in two cases: when more requests wait than
        rows are free, and when prompt tokens cost more in steps with decode tokens than in a large
        step without them, as in small models.
        """
        budget = self._config.prefill_budget_tokens
        table = self._table
        if len(self._waiting) > table.rows.num_free:
            return budget
        rows = np.array([req.row for req in self._prefilling], dtype=np.int32)
        waiting = self._waiting
        uncached: list[int] = (table.prefill_end[rows] - table.computed[rows]).tolist()
        uncached += [req.uncached_tokens for req in waiting]
        outputs: list[int] = (table.max_total_tokens[rows] - table.prefill_end[rows]).tolist()
        outputs += [req.max_total_tokens - len(req.tokens) for req in waiting]
        decode_steps = (table.max_total_tokens[decode_rows] - table.computed[decode_rows]).max()
        steps_until_start = np.maximum(max(decode_steps, *outputs) - np.array(outputs), 1)
        needed = min(int((np.cumsum(uncached) // steps_until_start).max()) + 1, budget)
        # Prefill continues even if more requests decode than a step of even size has tokens.
        needed = max(needed, EVEN_STEP_TOKENS // 2)
        num_decode = int(self._table.step_tokens[decode_rows].sum())
        index = bisect_left(self._sizes, max(num_decode + needed, EVEN_STEP_TOKENS))
        size = self._sizes[index]
        chunk = size - num_decode
        mixed_s = cost.predict_s(size, 0, 0) - cost.predict_s(num_decode, 0, 0)
        separate_s = cost.predict_s(budget, 0, 0) * chunk / budget
        return chunk if mixed_s < separate_s else budget

    def _timed_tokens(
        self, decode_rows: Int32Array, cost: StepCost, target_s: float, urgent: bool
    ) -> int:
        """Keep the predicted step time below a limit.

        The limit is the larger of the step-time target and MAX_SLOWDOWN times the predicted
        decode-only step. While a long queue waits, the limit grows with the queue, up to
        MAX_QUEUE_FACTOR times, for two reasons. The clients in the queue wait for their first
        token, and small chunks make them wait longer. Small chunks also cost throughput: when a
        step is compute-bound, a decode token takes 45 us next to a chunk and 27 us next to other
        decode tokens (8B model, H200).

        If there are several clients or priorities, the limit grows at most half as far. Each client
        has a queue for each priority of its prompts, and the shortest of these queues counts.
        Otherwise the queue of one client would delay the first tokens of the others. If the first
        priority in use has no prompts, it counts as an empty queue, since its next request must not
        wait for a long step.
        """
        num_decode = int(self._table.step_tokens[decode_rows].sum())
        keys = int(self._table.computed[decode_rows].sum())
        slowdown = MAX_SLOWDOWN if urgent else LOW_SLOWDOWN
        limit_s = max(target_s, slowdown * cost.predict_s(num_decode, keys, 0))
        queued = Counter({(req.priority, req.client): 0 for req in self._prefilling})
        for req in self._waiting:
            queued[req.priority, req.client] += req.uncached_tokens
        if not urgent:
            queued[self._waiting.highest_class, ""] = 0
        queue_s = cost.predict_s(min(queued.values()), 0, 0)
        # A request that arrives during step n enters step n + 2, so it waits for two steps.
        shared = len(self._clients) > 1 or self._waiting.has_classes
        most = MAX_QUEUE_FACTOR / 2 if shared else MAX_QUEUE_FACTOR
        limit_s *= min(max(queue_s / LONG_QUEUE_S, 1.0), most)
        return self._tokens_within(decode_rows, cost, limit_s)

    def _tokens_within(self, decode_rows: Int32Array, cost: StepCost, limit_s: float) -> int:
        """Return the prompt tokens of the largest step below this predicted time.

        The result is MIN_CHUNK_TOKENS or more.
        """
        num_decode = int(self._table.step_tokens[decode_rows].sum())
        keys = int(self._table.computed[decode_rows].sum())
        if self._prefilling:
            start = int(self._table.computed[self._prefilling[0].row])
        else:  # the cached part of the prompt that is admitted next
            first = next(iter(self._waiting))
            start = len(first.tokens) - first.uncached_tokens

        def step_s(tokens: int) -> float:
            chunk = tokens - num_decode
            return cost.predict_s(tokens, keys, chunk * (start + chunk // 2))

        smallest = bisect_left(self._sizes, num_decode + MIN_CHUNK_TOKENS)
        chosen = max(bisect_right(self._sizes, limit_s, lo=smallest, key=step_s) - 1, smallest)
        return self._sizes[chosen] - num_decode
