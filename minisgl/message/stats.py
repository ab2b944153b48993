"""The numbers that the scheduler counts and sends to the API server as one message."""

from collections.abc import Callable

import msgspec

from minisgl.core.config import MAX_DRAFTS

STEP_PHASES = ("prefill", "decode", "mixed")
BATCH_SIZE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
BATCH_TOKENS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def _buckets(bounds: tuple[int, ...]) -> Callable[[], list[int]]:
    """Return a function that makes the empty buckets of these bounds."""
    return ([0] * (len(bounds) + 1)).copy


class PhaseStats(msgspec.Struct, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Totals since the start, over the steps of one phase. The scheduler counts in this object.

    eager_steps, graph_steps  steps without and with a CUDA graph.
    seconds                   spent in steps; the time of two overlapping steps counts once.
    reqs, tokens              summed over the steps.
    reqs_counts[i]            steps with at most BATCH_SIZE_BOUNDS[i] requests and more than the
                              bound before; the last entry counts the steps above all bounds.
    tokens_counts[i]          the same for tokens and BATCH_TOKENS_BOUNDS.
    """

    eager_steps: int = 0
    graph_steps: int = 0
    seconds: float = 0.0
    reqs: int = 0
    tokens: int = 0
    reqs_counts: list[int] = msgspec.field(default_factory=_buckets(BATCH_SIZE_BOUNDS))
    tokens_counts: list[int] = msgspec.field(default_factory=_buckets(BATCH_TOKENS_BOUNDS))


class ConstraintTotals(msgspec.Struct, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Totals since the start, over the requests whose output a grammar constrains.

    compiles, compile_seconds  grammars compiled, and the time of the compiling threads.
    masks, mask_seconds        token masks computed, and the host time of these computations. The
                               device computes a forward step meanwhile.
    withheld                   rows that got no token in a step, because their client's masks took
                               too long.
    forced_tokens              output tokens that a grammar forced, so that no step sampled them.
    failures                   requests that ended with GrammarFailed, by the code of the error.
    """

    compiles: int = 0
    compile_seconds: float = 0.0
    masks: int = 0
    mask_seconds: float = 0.0
    withheld: int = 0
    forced_tokens: int = 0
    failures: dict[str, int] = {}


class DraftTotals(msgspec.Struct, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Totals since the start. Entry i counts the drafts at place i + 1 after a row's last token.

    drafted   draft tokens that steps forwarded.
    accepted  those that became output tokens, or would have, if the request had not ended.
    """

    drafted: list[int] = msgspec.field(default_factory=([0] * MAX_DRAFTS).copy)
    accepted: list[int] = msgspec.field(default_factory=([0] * MAX_DRAFTS).copy)


class ImageTotals(msgspec.Struct, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Totals since the start, and the state of the image buffer.

    encoded      images that the encoder has computed; `patches` are their patches.
    reused       images of a chunk whose features the buffer had.
    rows         rows of the buffer; `used` of them hold features.
    """

    encoded: int = 0
    patches: int = 0
    reused: int = 0
    rows: int = 0
    used: int = 0


class KVEventTotals(msgspec.Struct, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The state of the event stream of a replica.

    blocks            blocks that the events have announced and not removed.
    checksum          exclusive or of the hashes of these blocks. A subscriber compares its index.
    stored, removed   blocks announced and removed since the start.
    sequence          the next sequence number of the stream.
    dropped           batches that found a full queue. AllBlocksCleared follows a dropped batch.
    """

    blocks: int = 0
    checksum: int = 0
    stored: int = 0
    removed: int = 0
    sequence: int = 0
    dropped: int = 0


class SchedulerStats(msgspec.Struct, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Gauges and totals of rank 0, sent every 50 ms while it is busy and once when it becomes idle.

    The scheduler counts in one object of this class and sends it.

    step_id, busy         the API server detects a hung scheduler by these two fields.
    preparing             no step is due, because all requests wait for their constraints.
    prompt_tokens_total, cached_tokens_total
                          counted once per request, with its first output token.
    prefill_tokens_total  tokens computed in chunks: prompt tokens and forced tokens. A preempted
                          request computes its tokens again, and they count again.
    kind_pages            by the name of each further kind of memory (CacheKind), as for window
                          layers: its pages that running requests use, evictable, and free.
    known_tokens_total    prompt tokens of the same requests that the prefix cache knew. Not all
                          kinds of memory could use them.
    ended_pages_total     pages that evictions take first, because their session has ended.
    kind_totals           by the name of each further kind of memory: the numbers of its events.
    host_pages            pages of host memory by state (HostTier.usage), with a host cache.
    host_totals           HostTier.totals of rank 0.
    loading_reqs          requests that wait for a copy from host memory.
    phases                totals of each phase of STEP_PHASES; "mixed" steps prefill and decode.
    constraints           totals of the requests with a grammar.
    drafts                totals of speculative decoding; all 0 without --speculative.
    images                totals of the images of prompts; all 0 for a model that takes none.
    kv_events             state of the stream of KV events; all 0 without --kv-events-endpoint.
    """

    step_id: int = 0
    busy: bool = False
    preparing: bool = False
    waiting_reqs: int = 0
    running_reqs: int = 0
    free_pages: int = 0
    evictable_pages: int = 0
    locked_pages: int = 0
    total_pages: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    known_tokens_total: int = 0
    prefill_tokens_total: int = 0
    output_tokens_total: int = 0
    preemptions_total: int = 0
    overlapped_steps_total: int = 0
    evicted_pages_total: int = 0
    ended_pages_total: int = 0
    nonfinite_rows_total: int = 0
    kind_pages: dict[str, tuple[int, int, int]] = {}
    kind_totals: dict[str, dict[str, int]] = {}
    host_pages: dict[str, int] = {}
    host_totals: dict[str, int] = {}
    loading_reqs: int = 0
    phases: dict[str, PhaseStats] = {}
    constraints: ConstraintTotals = msgspec.field(default_factory=ConstraintTotals)
    drafts: DraftTotals = msgspec.field(default_factory=DraftTotals)
    images: ImageTotals = msgspec.field(default_factory=ImageTotals)
    kv_events: KVEventTotals = msgspec.field(default_factory=KVEventTotals)
