"""KV memory of Gemma 3 12B with long prompts: the real scheduler over simulated steps."""

import numpy as np

from minisgl.benchmark.virtual_engine import DEFAULT_COST, EngineSettings, read_cost
from minisgl.core import SamplingParams, SchedulerConfig
from minisgl.core.batch import WindowLayers
from minisgl.message.messages import AddReq
from minisgl.scheduler import LocalInbox, Scheduler

REQS, PROMPT, OUTPUT = 64, 16_000, 256
PAGE, WINDOW = 16, 1024
# From `minisgl plan --gpu H200 --context 16384 --kv-request-tokens 16256`: the pages of both pools,
# the number of requests, and the bytes of one token in the layers of each pool.
PAGES, WINDOW_PAGES, ROWS = 77_879, 5_059, 79
TOKEN_BYTES, WINDOW_TOKEN_BYTES = 65_536, 327_680
# A window of 1,024 tokens may begin in the middle of a page.
PAGES_OF_A_WINDOW = WINDOW // PAGE + 1


def requests() -> list[AddReq]:
    ids = np.random.default_rng(0).integers(10, 200_000, (REQS, PROMPT), dtype=np.int32)
    sampling = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, seed=0)
    return [
        AddReq(uid=uid, token_ids=row.tobytes(), sampling=sampling) for uid, row in enumerate(ids)
    ]


def test_64_long_requests_hold_at_most_1_1_times_their_need() -> None:
    engine = EngineSettings(read_cost(DEFAULT_COST), PAGES, ROWS, 16_384).engine()
    engine.window = WindowLayers(WINDOW, WINDOW_PAGES)
    inbox = LocalInbox()
    config = SchedulerConfig(target_step_ms=None)
    scheduler = Scheduler(
        engine,
        config,
        vocab_size=262_208,
        eos_token_ids=(1,),
        inbox=inbox,
        send=lambda output: None,
    )
    inbox.messages.extend(requests())
    held, together = [0], 0
    while inbox.messages or not scheduler.idle:
        scheduler.iterate()
        stats = scheduler.stats()
        of_windows = stats.kind_pages["window"][0] * WINDOW_TOKEN_BYTES
        held.append(PAGE * (stats.locked_pages * TOKEN_BYTES + of_windows))
        together += stats.running_reqs == REQS
    pages = -(-(PROMPT + OUTPUT) // PAGE)
    need = PAGE * REQS * (pages * TOKEN_BYTES + PAGES_OF_A_WINDOW * WINDOW_TOKEN_BYTES)
    assert together > 100, "all requests must run at once, for more than 100 steps"
    assert 0.9 * need < max(held) <= 1.1 * need
