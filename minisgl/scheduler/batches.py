"""`build_batch`: the batch of a plan, from the columns of the request table."""

from collections.abc import Mapping

import numpy as np

from minisgl.core import Batch, Int32Array
from minisgl.scheduler.kv_manager import KVManager


def build_batch(
    kv_manager: KVManager,
    step_id: int,
    decode_rows: Int32Array,
    chunks: Mapping[int, int],
    drafting: bool,
) -> Batch:
    """Return the batch of the decoding rows, with table.step_tokens tokens each, and the chunks.

    chunks: the number of prompt tokens of each row. Takes the page updates of all these rows.
    """
    table, num_decode = kv_manager.table, len(decode_rows)
    rows = np.concatenate([decode_rows, np.array([*chunks], dtype=np.int32)])
    start = table.computed[rows]
    lengths = table.step_tokens[rows]
    lengths[num_decode:] = [*chunks.values()]
    ends = start + lengths
    chunk_ids = [
        table.tokens[row, table.computed[row] : table.computed[row] + length]
        for row, length in chunks.items()
    ]
    samples = ends >= table.prefill_end[rows]
    return Batch(
        step_id=step_id,
        num_decode=num_decode,
        rows=rows,
        start=start,
        lengths=lengths,
        samples=samples,
        chunk_ids=np.concatenate([rows[:0], *chunk_ids]),
        page_updates=kv_manager.take_updates(rows),
        sampling=table.sampling(rows),
        logit_edits=table.edited_reqs(rows, ends, samples),
        logprobs=table.logprobs_request(rows, start, ends, samples),
        drafting=drafting,
        histories=table.histories(rows, num_decode, samples) if drafting else (),
    )
