"""One generation inside the scheduler."""

from dataclasses import dataclass
from enum import StrEnum

from minisgl.core import FinishReason, Int32Array, SamplingParams
from minisgl.kvcache import RadixNode


class ReqState(StrEnum):
    """Where a req is. It moves down this list, except that preemption takes it back to WAITING."""

    WAITING = "waiting"  # owns nothing
    PREFILL = "prefill"  # owns a row and its prompt's pages; part of the prompt is not launched
    DECODE = "decode"  # one token per step, until its last one is launched and has its result
    ENDING = "ending"  # must leave, but a step in flight contains it
    FINISHED = "finished"  # owns nothing and has had its terminal message


@dataclass(slots=True, eq=False)
class Req:
    """A generation and its claims on memory. Lengths by row stand in RequestTable.

    tokens         int32, prompt and outputs so far; valid while the req owns no row.
    prompt_len     tokens of the prompt as the client sent it.
    limit          most tokens in all, prompt + max_tokens cut to context and pool.
    to_compute     of its tokens, those that were not cached when it began to wait, nor to be
                   computed for an older req.
    serial         order of arrival; preemption takes the highest.
    row            line in page table and token pool, -1 without one.
    node           locked place in the prefix cache; tree_pages leading pages of the row are the
                   cache's, the others this req's own.
    ending         why it is to end; one in state ENDING without is preempted and waits again.
    cache_salt     reqs of another salt do not share its prefix.
    prompt_reported  prompt tokens whose log-probabilities have been sent.
    cached_tokens  prefix hit of the first admission, which is what the client is told.
    admitted_s     when that was, as in PrefillDone; 0 before.
    """

    uid: int
    tokens: Int32Array
    prompt_len: int
    limit: int
    sampling: SamplingParams
    seed: int
    serial: int
    cache_salt: str = ""
    state: ReqState = ReqState.WAITING
    to_compute: int = 0
    row: int = -1
    node: RadixNode | None = None
    tree_pages: int = 0
    cached_tokens: int = 0
    admitted: bool = False
    admitted_s: float = 0.0
    opened: bool = False
    ending: FinishReason | None = None
    prompt_reported: int = 0
