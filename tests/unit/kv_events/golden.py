"""Messages of the event stream, with the events that llm-d's decoder reads from them.

golden.json holds what `VLLMAdapter.ParseMessage` of llm-d-router (commit ebab6879, Apache-2.0,
pkg/kvevents/engineadapter/vllm_adapter.go) returned for the messages of this module, as JSON.
"""

import msgspec
import numpy as np

from minisgl.kv_events import CacheEvents
from minisgl.kv_events.messages import AllBlocksCleared, EventBatch, KVEvent
from minisgl.message.stats import KVEventTotals

TOPIC = "kv@pod-1@minisgl-demo"


def messages() -> list[bytes]:
    """The payloads: stored blocks, a continued and a salted prompt, removed and cleared blocks."""
    batches: list[list[KVEvent]] = []
    events = CacheEvents(
        4, "minisgl-demo", lambda batch: batches.append(batch) or True, KVEventTotals(), 2, 20
    )
    tokens = np.array([1, 127, 128, 70_000, 5, 6, 7, 8, 9, 10, 11, 12], dtype=np.int32)
    pages = np.arange(6, dtype=np.int32)
    events.stored(tokens[:8], pages[:4], "")
    events.flush()
    events.stored(tokens, pages, "")
    events.flush()
    events.stored(tokens, pages + 6, "tenant-a")
    events.flush()
    events.removed(pages[3:])
    events.flush()
    batches.append([AllBlocksCleared()])
    return [msgspec.msgpack.encode(EventBatch(1234567890.5, batch)) for batch in batches]
