"""`PrefillBudget`: the number of prompt tokens of the next step."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from minisgl.core import Int32Array, SchedulerConfig, StepCost, step_sizes
from minisgl.scheduler.request import Req
from minisgl.scheduler.request_table import RequestTable

MIN_CHUNK_TOKENS = 32  # prefill goes on, however long a step is predicted to take
MAX_SLOWDOWN = 2.25  # a step with a chunk may take this many times the decode-only step
LONG_QUEUE_S = 0.25  # a queue of n times this prefill time allows steps of n times the limit,
MAX_QUEUE_FACTOR = 4.0  # but not more than this: streams still get some ten tokens a second
EVEN_STEP_TOKENS = 512  # larger steps hardly lower the time per token (8B)


@dataclass(slots=True)
class PrefillBudget:
    """Limits the prompt tokens of a step, so that decoding requests are not slowed down too much.

    While no request decodes, or without known step costs, the limit is prefill_budget_tokens. Next
    to decoding requests it is lower:

    - With a step-time target (a server), the predicted step time stays below a limit: `_timed`.
    - Without one (the offline LLM), only the total time counts. Prompts of requests with few
      output tokens are then spread evenly over the decode steps: `_even`.

    _prefilling and _waiting are the planner's queues, in the order in which prompts are computed.
    The budget reads them at each call, and the planner goes on changing them.
    """

    _config: SchedulerConfig
    _table: RequestTable
    _prefilling: Sequence[Req]
    _waiting: Sequence[Req]
    _sizes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        most_tokens = self._config.prefill_budget_tokens + self._table.rows.size
        self._sizes = step_sizes(most_tokens + 1024)

    def tokens(self, decode_rows: Int32Array, cost: StepCost | None) -> int:
        """Return the largest number of prompt tokens that the next step may contain.

        decode_rows: int32, the rows that decode in this step. cost: predicts step times; None when
        they are unknown.
        """
        budget = self._config.prefill_budget_tokens
        target_ms = self._config.target_step_ms
        if not len(decode_rows) or cost is None or not (self._prefilling or self._waiting):
            return budget
        if target_ms is None:
            return min(self._even(decode_rows, cost), budget)
        return min(self._timed(decode_rows, cost, target_ms / 1000), budget)

    def _even(self, decode_rows: Int32Array, cost: StepCost) -> int:
        """Spread prompts over the decode steps, in steps of even size.

        A decode step with few requests reads all weights for few tokens, so prompt tokens in the
        same step cost little. They do not delay the end: the step size is the smallest at which no
        request ends later than the one with the most tokens left, assuming that each request
        generates all tokens that it may. For this, the prompts of a request and of all requests
        before it are computed by the time that the request has to start decoding.

        All of prefill_budget_tokens is returned when more requests wait than rows are free, and
        when prompt tokens next to decode tokens cost more than in a large step of their own (small
        models).
        """
        budget = self._config.prefill_budget_tokens
        table = self._table
        if len(self._waiting) > table.rows.num_free:
            return budget
        rows = np.array([req.row for req in self._prefilling], dtype=np.int32)
        waiting = self._waiting
        uncached: list[int] = (table.prefill_end[rows] - table.computed[rows]).tolist()
        uncached += [req.uncached_tokens for req in waiting]
        outputs: list[int] = (table.limit[rows] - table.prefill_end[rows]).tolist()
        outputs += [req.max_total_tokens - len(req.tokens) for req in waiting]
        decode_steps = (table.limit[decode_rows] - table.computed[decode_rows]).max()
        steps_until_start = np.maximum(max(decode_steps, *outputs) - np.array(outputs), 1)
        needed = min(int((np.cumsum(uncached) // steps_until_start).max()) + 1, budget)
        needed = max(needed, EVEN_STEP_TOKENS // 2)  # prefill goes on, however many requests decode
        num_decode = len(decode_rows)
        index = bisect_left(self._sizes, max(num_decode + needed, EVEN_STEP_TOKENS))
        size = self._sizes[index]
        chunk = size - num_decode
        mixed_s = cost.predict_s(size, 0, 0) - cost.predict_s(num_decode, 0, 0)
        separate_s = cost.predict_s(budget, 0, 0) * chunk / budget
        return chunk if mixed_s < separate_s else budget

    def _timed(self, decode_rows: Int32Array, cost: StepCost, target_s: float) -> int:
        """Keep the predicted step time below a limit.

        The limit is the larger of the step-time target and MAX_SLOWDOWN times the predicted
        decode-only step. While a long queue waits, the limit grows with the queue, up to
        MAX_QUEUE_FACTOR times: short gaps between tokens are of no use to clients that wait for
        their first token. Small steps would also cost throughput: where arithmetic bounds a step, a
        decode token costs 45 us next to a chunk and 27 us next to other decode tokens (8B, H200).
        """
        num_decode = len(decode_rows)
        keys = int(self._table.computed[decode_rows].sum())
        limit_s = max(target_s, MAX_SLOWDOWN * cost.predict_s(num_decode, keys, 0))
        queue_s = cost.predict_s(sum(req.uncached_tokens for req in self._waiting), 0, 0)
        limit_s *= min(max(queue_s / LONG_QUEUE_S, 1.0), MAX_QUEUE_FACTOR)
        if self._prefilling:
            start = int(self._table.computed[self._prefilling[0].row])
        else:  # the cached part of the prompt that is admitted next
            start = len(self._waiting[0].tokens) - self._waiting[0].uncached_tokens

        def step_s(tokens: int) -> float:
            chunk = tokens - num_decode
            return cost.predict_s(tokens, keys, chunk * (start + chunk // 2))

        smallest = bisect_left(self._sizes, num_decode + MIN_CHUNK_TOKENS)
        chosen = max(bisect_right(self._sizes, limit_s, lo=smallest, key=step_s) - 1, smallest)
        return self._sizes[chosen] - num_decode
